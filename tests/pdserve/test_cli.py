"""The command line: quick to help, one line for a mistake, and the exit code that says whose it was."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve import cli
from pdserve.config import RouterOptions, ServeOptions
from pdserve_wire.auth import read_token

COMMANDS = ("run", "serve", "chat", "status", "worker", "router", "token", "models")
QUESTION = "What is the capital of France?"


def pdserve(*words: str, timeout_s: float = 100.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a person runs it."""
    command = [sys.executable, "-m", "pdserve.cli", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environ)


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = "import sys; from pdserve.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print({'torch', 'ray', 'transformers', 'grpc', 'aiohttp', 'yaml', 'asyncio'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.endswith("set()\n"), run.stdout
    assert min(_help_cpu_s() for _ in range(3)) < 0.3


def _help_cpu_s() -> float:
    """Processor time: what else the machine does is not the command's fault."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert pdserve("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"  pdserve {command}" in out
    assert "--beat-fd" not in out


def test_the_overview_names_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert all(f"    {command} " in out for command in COMMANDS)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("pdserve 0.")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "the following arguments are required: COMMAND; see 'pdserve --help'"),
        (["serv"], "invalid choice: 'serv'"),
        (["serve", "--prefil=2"], "unknown: --prefil=2; did you mean --prefill?; see 'pdserve serve --help'"),
        (["serve", "--zzz"], "unknown: --zzz; see 'pdserve serve --help'"),
        (["serve", "--decode=x"], "--decode x: must be a whole number"),
        (["serve", "--transport", "ucx"], "--transport ucx: not built yet"),
        (["serve", "--config", "missing.yaml"], "--config missing.yaml: No such file or directory"),
        (["chat"], "the following arguments are required: PROMPT; see 'pdserve chat --help'"),
        (["worker", "--role=decode", "--router=a:1"], "--cluster-token-file is required"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pdserve: ")
    assert problem in captured.err
    assert captured.err.count("\n") == 1


def test_the_command_line_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("decode: 2\nkv-cache-gb: 1.5\nmodel: from-the-file\n")
    seen: list[ServeOptions] = []
    monkeypatch.setattr("pdserve.serve.serve", lambda options: seen.append(options) or 0)
    assert cli.main(["serve", "--config", str(config), "--decode", "3"]) == 0
    assert cli.main(["serve", "--config", str(config), "./model"]) == 0
    assert [(one.decode, one.engine.kv_cache_gb, one.engine.model) for one in seen] == [
        (3, 1.5, "from-the-file"),
        (2, 1.5, "./model"),
    ]


def test_a_process_is_told_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RouterOptions] = []
    monkeypatch.setattr("pdserve.router_process.main", lambda options: seen.append(options) or 3)
    assert cli.main(["router", "--fleet=a:1", "--cluster-token-file=t", "--ready-fd=9"]) == 3
    assert (seen[0].fleet, seen[0].cluster_token_file, seen[0].ready_fd) == ("a:1", Path("t"), 9)


def test_token_writes_a_token_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "token"
    assert cli.main(["token", str(path)]) == 0
    token = read_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert cli.main(["token", str(path)]) == 0
    assert read_token(path) == token
    err = capsys.readouterr().err
    assert "written" in err
    assert "kept" in err
    assert token not in err


def test_models_prints_the_folder(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    assert capsys.readouterr().out == f"{model_folder}\n"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["models", "no-such-model"], "no-such-model: no such model; give 'bundled'"),
        (["run", "--model=no-such-model", "Hello"], "no-such-model: no such model"),
        (["token", "/no-such-folder/token"], "can't be written"),
        (["status", "--url=http://127.0.0.1:1"], "no server answers there; start one with 'pdserve serve'"),
        (["chat", "--url=http://127.0.0.1:1", "Hello"], "no server answers there"),
    ],
)
def test_a_failure_is_one_line_and_exit_code_1(words: list[str], problem: str) -> None:
    run = pdserve(*words)
    assert (run.returncode, run.stdout) == (1, ""), run.stderr
    last = run.stderr.splitlines()[-1]
    assert last.startswith("pdserve: ")
    assert problem in last
    assert "Traceback" not in run.stderr


def test_an_error_that_nobody_foresaw_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_options: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("pdserve.serve.serve", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["serve"])


def test_run_answers_over_the_chat_template(model_folder: Path) -> None:
    run = pdserve("run", QUESTION, "--max-tokens=16", "--kv-cache-gb=0.05")
    assert run.returncode == 0, run.stderr
    assert run.stdout == "The capital of France is Paris.\n"
    assert "pdserve: loaded in" in run.stderr


def test_run_raw_continues_the_prompt(model_folder: Path) -> None:
    words = ("--max-tokens=4", "--kv-cache-gb=0.05", "--temperature=0.8", "--seed=1")
    run = pdserve("run", "--raw", "The capital of France is", *words)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
