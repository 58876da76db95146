"""The generated protobuf modules are those of the .proto files, and work with the packages we ask for."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROTO = ROOT / "proto"


def test_generated_modules_match_the_proto_files(tmp_path: Path) -> None:
    sources = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.glob("pdserve_pb/*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *sources], cwd=PROTO, check=True)
    fresh = {path.name: path.read_text() for path in tmp_path.glob("pdserve_pb/*")}
    committed = {path.name: path.read_text() for path in PROTO.glob("pdserve_pb/*_pb2*.py*")}
    assert fresh.keys() == committed.keys(), "run 'make proto'"
    assert [name for name in fresh if fresh[name] != committed[name]] == [], "run 'make proto'"


def test_generated_modules_work_with_the_oldest_packages_that_pyproject_allows() -> None:
    generated = "".join(path.read_text() for path in PROTO.glob("pdserve_pb/*_pb2*.py"))
    needs = {
        "protobuf": set(re.findall(r"Protobuf Python Version: ([\d.]+)", generated)),
        "grpcio": set(re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", generated)),
    }
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for package, (version,) in needs.items():
        (allowed,) = (line for line in dependencies if re.match(rf"{package}\b(?!-)", line))
        assert f">={version}" in allowed
