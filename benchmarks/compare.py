"""Servers one after the other, the same requests to each, in one run on one machine.

    python -m benchmarks.compare --servers one-engine,pools,vllm

The result goes to RESULTS.md beside this file, newest first, and with all figures of each round to results/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.client import NoServer, Target
from benchmarks.machine import busy_cores, this_machine
from benchmarks.report import Measurement, notes, ratio_table, table
from benchmarks.serve import Measured, Plan, add_plan_options, measure, plan
from benchmarks.servers import SERVERS, NotInstalled, NotStarted, Server, end_on_sigterm, running
from benchmarks.workload import Workload

_FOLDER = Path(__file__).parent
_RESULTS = _FOLDER / "RESULTS.md"
_HEAD = """# Results

Each section is one run of `python -m benchmarks.compare`; newest first. Compare within a section, as ratios: figures
drift from machine to machine and from day to day. A figure is the median of its rounds. Busy cores are those of the
load generator, of the server, of all else on the machine, and what the host took away.
"""
_SAMPLED = (0.8, 0.95)  # temperature, top-p
_LOOK_S = 3.0
_QUIET_CORES = 0.1


@dataclass(frozen=True, slots=True)
class Compared:
    """A server, and what was measured of it."""

    server: Server
    busy_cores: float | None  # before its start: what else the machine did
    ready_s: float
    memory_gb: float | None  # at the end, proportional set size of all its processes
    measured: Measured


def compare(names: Sequence[str], todo: Plan, quiet_s: float = 0.0) -> tuple[list[Compared], list[str]]:
    """Measure the servers in turn; what could be, and why the others could not.

    Before each start it waits up to `quiet_s` until nothing else runs on the machine.
    """
    done: list[Compared] = []
    missing: list[str] = []
    for name in names:
        _say(f"{name}: starting")
        try:
            done.append(_measure(SERVERS[name], todo, quiet_s))
        except (NotInstalled, NotStarted, NoServer) as error:
            _say(f"{name}: {error}\n{name}: going on without it")
            missing.append(f"{name}: {str(error).partition(chr(10))[0]}")
    return done, missing


def _measure(server: Server, todo: Plan, quiet_s: float) -> Compared:
    busy = _wait_quiet(server.name, quiet_s)
    with running(server) as found:
        _say(f"{server.name}: ready in {found.ready_s:.0f} s")
        measured = asyncio.run(measure(Target(found.url, ""), todo, server.name, found.pids))
        return Compared(server, busy, found.ready_s, found.memory_gb, measured)


def _wait_quiet(name: str, limit_s: float) -> float | None:
    """Until little runs on the machine, or the time is up; how many cores were busy at last."""
    deadline = time.monotonic() + limit_s
    while True:
        busy = busy_cores(_LOOK_S)
        if busy is None or busy < _QUIET_CORES:
            return busy
        if time.monotonic() > deadline:
            _say(f"{name}: the machine is NOT QUIET: {busy:.1f} cores are busy before the start")
            return busy


def section(started: datetime, done: Sequence[Compared], missing: Sequence[str], arguments: str) -> str:
    """What a run adds to RESULTS.md."""
    measurements: list[Measurement] = [one for each in done for one in each.measured.measurements]
    lines = [f"## {started:%Y-%m-%d %H:%M} UTC, {_revision()}", "", str(this_machine()), ""]
    lines += [f"`python -m benchmarks.compare {arguments}`", ""]
    lines += ["| server | command | ready after | memory | busy cores, load average before |"]
    lines += ["| --- | --- | ---: | ---: | ---: |"]
    for each in done:
        memory = f"{each.memory_gb:.1f} GB" if each.memory_gb is not None else "-"
        load = " ".join(f"{value:.2f}" for value in each.measured.load_average)
        before = f"{each.busy_cores:.2f}, {load}" if each.busy_cores is not None else load
        lines.append(f"| {each.server.name} | `{each.server}` | {each.ready_s:.0f} s | {memory} | {before} |")
    lines += ["", table(measurements), ""]
    for base in ("vllm", "one-engine"):
        if ratios := ratio_table(measurements, base):
            lines += [ratios, ""]
    lines += [f"- {note}" for note in (*notes(measurements), *missing)]
    return "\n".join(lines)


def add_section(path: Path, text: str) -> None:
    """Put a section before the older ones."""
    content = path.read_text() if path.exists() else _HEAD
    head, mark, older = content.partition("\n## ")
    path.write_text(f"{head.rstrip()}\n\n{text.rstrip()}\n{mark}{older}")


def sampled(workloads: Sequence[Workload]) -> tuple[Workload, ...]:
    """The plain workloads again, with tokens drawn instead of taken greedily."""
    temperature, top_p = _SAMPLED
    return tuple(
        replace(
            workload,
            name=f"{workload.name}, temperature {temperature}",
            ask=replace(workload.ask, temperature=temperature, top_p=top_p),
        )
        for workload in workloads
        if workload.name.isdigit()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.partition("\n")[0])
    parser.add_argument("--servers", type=_names, default=("one-engine", "pools", "vllm"), metavar="NAME[,NAME...]",
        help=f"of {', '.join(SERVERS)} (one-engine,pools,vllm)")  # fmt: skip
    parser.add_argument("--sampled", action="store_true", help="each number of streams again, with temperature 0.8")
    parser.add_argument("--wait-quiet-s", type=float, default=0.0, metavar="S",
        help="before each server, wait up to so long until nothing else runs here (0: only tell)")  # fmt: skip
    parser.add_argument("--dry", action="store_true", help="print the section; write nothing")
    add_plan_options(parser)
    options = parser.parse_args(arguments)
    end_on_sigterm()
    todo = plan(options)
    if options.sampled:
        todo = replace(todo, workloads=todo.workloads + sampled(todo.workloads))
    started = datetime.now(UTC)
    done, missing = compare(options.servers, todo, options.wait_quiet_s)
    if not done:
        return 1
    text = section(started, done, missing, " ".join(arguments))
    print(text)
    if not options.dry:
        add_section(_RESULTS, text)
        _write_json(started, done)
    return 1 if any(one.num_failed for each in done for one in each.measured.measurements) else 0


def _write_json(started: datetime, done: Sequence[Compared]) -> None:
    path = _FOLDER / "results" / f"{started:%Y-%m-%dT%H%M}.json"
    path.parent.mkdir(exist_ok=True)
    servers = [
        {
            "server": str(each.server),
            "busy_cores": each.busy_cores,
            "ready_s": each.ready_s,
            "memory_gb": each.memory_gb,
            **each.measured.as_dict(),
        }
        for each in done
    ]
    path.write_text(json.dumps({"revision": _revision(), "servers": servers}, indent=1) + "\n")


def _revision() -> str:
    """The commit that was measured, and whether files differ from it."""
    git = ["git", "-C", str(_FOLDER), "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(git, capture_output=True, text=True)
    return done.stdout.strip() or "no revision"


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in SERVERS:
            raise argparse.ArgumentTypeError(f"{name}: must be one of {', '.join(SERVERS)}")
    return names


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
