"""The shape of the source: which package may import which, and through which door a library comes.

The tables are those of docs/architecture.md.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "router": ROOT / "router",
    "prefill_worker": ROOT / "prefill_worker",
    "decode_worker": ROOT / "decode_worker",
    "kvtransfer": ROOT / "kvtransfer",
    "engine": ROOT / "engine",
    "pdserve": ROOT / "pdserve",
    "pdserve_pb": ROOT / "proto/pdserve_pb",
    "pdserve_wire": ROOT / "proto/pdserve_wire",
}

# `engine.sampling` is a leaf that loads no torch: the one SamplingParams of both sides of the wire.
WIRE = {"pdserve_wire", "pdserve_pb", "engine.sampling"}
MAY_IMPORT = {
    "pdserve": set(PACKAGES),
    "router": WIRE,
    "router.text": set(),
    "prefill_worker": {"engine", "kvtransfer"} | WIRE,
    "decode_worker": {"engine", "kvtransfer"} | WIRE,
    "pdserve_wire": {"pdserve_pb", "engine.sampling"},
    "pdserve_pb": set(),
    "engine": set(),
    "kvtransfer": set(),
}

# library -> the files that may import it
DOORS = {
    "ray": ["pdserve/ray_session.py", "pdserve/worker_actor.py"],
    "ucxx": ["kvtransfer/ucx.py"],
    "triton": ["engine/attention/triton*.py"],
    "transformers": ["engine/model_loader.py", "engine/model_convert.py"],
    "tokenizers": ["router/text/*.py", "engine/model_convert.py"],
    "jinja2": ["router/text/*.py"],
    "llguidance": ["router/text/*.py", "engine/grammar.py"],
    "prometheus_client": ["*/metrics.py"],
}
# top-level name -> the packages that never import it
NEVER = {
    "torch": ["router", "pdserve_wire", "pdserve_pb"],
    "grpc": ["engine", "kvtransfer", "router.text"],
    "google": ["engine", "kvtransfer", "router.text"],
    "aiohttp": ["engine", "kvtransfer", "router.text", "prefill_worker", "decode_worker", "pdserve_wire"],
}


def source_files() -> Iterator[tuple[str, Path]]:
    """Dotted module name and file of every module of ours."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            dotted = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
            yield dotted.removesuffix(".__init__"), path


MODULES = dict(source_files())


def imported_names(path: Path) -> set[str]:
    """Every imported name, dotted, also those inside functions and under TYPE_CHECKING."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def owner_of(module: str, table: dict[str, set[str]]) -> str:
    """The row that holds for `module`: the longest that contains it."""
    return max((row for row in table if is_in(module, row)), key=len)


def test_every_arrow_runs_down_a_floor() -> None:
    wrong = []
    for module, path in MODULES.items():
        row = owner_of(module, MAY_IMPORT)
        allowed = MAY_IMPORT[row] | {row}
        ours = [name for name in imported_names(path) if name.partition(".")[0] in PACKAGES]
        wrong += [f"{module} imports {name}" for name in ours if not any(is_in(name, one) for one in allowed)]
    assert not wrong


def test_each_library_comes_through_its_door() -> None:
    wrong = []
    for module, path in MODULES.items():
        file = path.relative_to(ROOT).as_posix()
        for name in imported_names(path):
            library = name.partition(".")[0]
            if not any(fnmatch(file, door) for door in DOORS.get(library, ["*"])):
                wrong.append(f"{file} imports {library}")
            if any(is_in(module, package) for package in NEVER.get(library, [])):
                wrong.append(f"{module} imports {library}")
    assert not wrong


def test_no_init_does_work() -> None:
    busy = []
    for module, path in MODULES.items():
        if path.name == "__init__.py":
            body = ast.parse(path.read_text()).body
            if any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in body):
                busy.append(module)
    assert not busy


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in MODULES.values()}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def run_python(code: str) -> None:
    path = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'proto')]}\n"
    run = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr


def modules_of(package: str) -> list[str]:
    doors = {*DOORS["ucxx"], *DOORS["triton"]}
    return [
        module
        for module, path in MODULES.items()
        if is_in(module, package) and not any(fnmatch(path.relative_to(ROOT).as_posix(), door) for door in doors)
    ]


def test_router_loads_no_torch_transformers_or_ray() -> None:
    run_python(
        f"""
import importlib
for module in {modules_of("router")}:
    importlib.import_module(module)
loaded = {{"torch", "transformers", "ray", "ucxx", "triton"}} & set(sys.modules)
sys.exit(f"router loads {{loaded}}" if loaded else 0)
"""
    )


@pytest.mark.parametrize("package", ["engine", "kvtransfer"])
def test_works_where_ray_ucx_and_triton_are_absent(package: str) -> None:
    run_python(
        f"""
import importlib
for library in ("ray", "ucxx", "triton", "grpc"):
    sys.modules[library] = None  # importing it raises ImportError
for module in {modules_of(package)}:
    importlib.import_module(module)
"""
    )


def test_sampling_is_a_leaf_without_torch() -> None:
    run_python("import engine.sampling; sys.exit('torch' in sys.modules)")
