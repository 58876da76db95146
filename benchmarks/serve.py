"""TTFT, TPOT, ITL and tokens/s of a running OpenAI server, at some numbers of streams.

python -m benchmarks.serve --url http://127.0.0.1:8000 --streams 1,8,32
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.client import APIS, Ask, Client, NoServer, Target
from benchmarks.machine import CpuClock, Machine, this_machine
from benchmarks.prompts import Prompts
from benchmarks.report import Measurement, notes, table
from benchmarks.workload import LongPrompts, Workload, run


@dataclass(frozen=True, slots=True)
class Plan:
    """The workloads of one measurement, and how often each is run."""

    workloads: tuple[Workload, ...]
    num_repeats: int = 3
    num_warmup: int | None = None  # requests before each workload; one a stream if None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """What `measure` gives: the figures, and under which conditions they were read."""

    label: str
    target: Target
    machine: Machine
    started: str  # UTC
    load_average: tuple[float, float, float]  # before
    seed: int
    measurements: tuple[Measurement, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def measure(
    target: Target, plan: Plan, label: str, server_pids: Iterable[int] = (), api_key: str | None = None
) -> Measured:
    """Run the plan. Raises `NoServer` where the server doesn't answer a first short request."""
    started, load_average = datetime.now(UTC), os.getloadavg()
    prompts, pids = Prompts(plan.seed), tuple(server_pids)
    measurements: list[Measurement] = []
    async with Client(target, api_key=api_key) as client:
        if not target.model:
            client.target = replace(target, model=await client.find_model())
        await _calibrate(client, prompts, plan.workloads[0].prompt_tokens)
        for workload in plan.workloads:
            num_warmup = workload.num_streams if plan.num_warmup is None else plan.num_warmup
            if num_warmup:
                await run(client, workload.warm_up(num_warmup), prompts)
            rounds = []
            for number in range(plan.num_repeats):
                rounds.append(await run(client, workload, prompts, lambda: CpuClock(pids)))
                _say(f"{label}, {workload.name}, round {number + 1}: {rounds[-1].tokens_per_s:.1f} tok/s")
            measurements.append(Measurement(label, workload, tuple(rounds)))
        return Measured(
            label=label,
            target=client.target,
            machine=this_machine(),
            started=f"{started:%Y-%m-%d %H:%M} UTC",
            load_average=load_average,
            seed=plan.seed,
            measurements=tuple(measurements),
        )


async def _calibrate(client: Client, prompts: Prompts, num_tokens: int) -> None:
    """Find the server's optional fields, and how many words make a prompt of that many tokens."""
    prompt = prompts.make(num_tokens)
    reply = await client.probe(prompt)
    if reply.num_prompt_tokens:
        prompts.calibrate(len(prompt.split()), reply.num_prompt_tokens)


def workloads(options: argparse.Namespace) -> tuple[Workload, ...]:
    """Those that a command line asks for: one for each number of streams, then the long prompts."""
    ask = Ask(options.max_tokens, options.temperature, options.top_p)
    found = [
        Workload(str(num), num, num * options.requests_per_stream, options.prompt_tokens, ask)
        for num in options.streams
    ]
    if (num := options.long_prompts) and (size := options.long_prompt_tokens):
        found.append(Workload(f"{num} of {size} tokens", num, num, size, ask))
    if duration_s := options.mixed_s:
        num, size, every_s = options.mixed_streams, options.long_prompt_tokens, options.long_interval_s
        name = f"{num}, and a prompt of {size} tokens each {every_s:g} s"
        found.append(Workload(name, num, 0, options.prompt_tokens, ask, duration_s, LongPrompts(size, every_s)))
    return tuple(found)


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """The options that `workloads` and `plan` read."""
    add = parser.add_argument
    add("--streams", type=_numbers, default=(1, 8, 32), metavar="N[,N...]", help="requests at a time (1,8,32)")
    add("--prompt-tokens", type=_positive, default=75, metavar="N", help="length of prompts, about (75)")
    add("--max-tokens", type=_positive, default=64, metavar="N", help="length of answers (64)")
    add("--temperature", type=float, default=0.0, metavar="X", help="0: always the likeliest token (0)")
    add("--top-p", type=float, default=1.0, metavar="X", help="1: off (1)")
    add("--requests-per-stream", type=_positive, default=4, metavar="N", help="in each round (4)")
    add("--warmup", type=int, default=None, metavar="N", help="requests before each row, not counted (one a stream)")
    add("--repeat", type=_positive, default=3, metavar="N", help="rounds; a figure is the median of its rounds (3)")
    add("--long-prompts", type=int, default=0, metavar="N", help="a row with so many long prompts at once (none)")
    add("--long-prompt-tokens", type=_positive, default=1300, metavar="N", help="their length (1300)")
    add("--mixed-s", type=float, default=0.0, metavar="S", help="a row of so many seconds with streams of short "
        "prompts beside which long ones arrive; the figures are those of the short ones (none)")  # fmt: skip
    add("--mixed-streams", type=_positive, default=8, metavar="N", help="streams of that row (8)")
    add("--long-interval-s", type=float, default=5.0, metavar="S", help="between two long prompts of that row (5)")
    add("--seed", type=int, default=None, metavar="N", help="of the prompts; a fresh one if not set, so that a server "
        "that was measured before finds nothing in its prefix cache")  # fmt: skip


def plan(options: argparse.Namespace) -> Plan:
    seed = options.seed if options.seed is not None else time.time_ns() % 1_000_000_007
    return Plan(workloads(options), options.repeat, options.warmup, seed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (http://127.0.0.1:8000)")
    parser.add_argument("--model", default="", help="the model's name there; the first that it lists if not set")
    parser.add_argument("--api", choices=APIS, default="completions", help="(completions)")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the server's API key")
    parser.add_argument("--label", default="", help="the server's name in the table; its URL if not set")
    parser.add_argument("--server-pid", type=int, action="append", default=[], metavar="PID", help="a process of the "
        "server whose CPU time is told, with all that descend from it; may be given again")  # fmt: skip
    add_plan_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures of each round there")
    parser.add_argument("--markdown", action="store_true", help="print the table alone, without conditions")
    options = parser.parse_args(arguments)
    target = Target(options.url.rstrip("/"), options.model, options.api)
    api_key = os.environ[options.api_key_env] if options.api_key_env else None
    try:
        pids = _with_descendants(options.server_pid)
        measured = asyncio.run(measure(target, plan(options), options.label or target.url, pids, api_key))
    except NoServer as error:
        sys.exit(f"benchmarks.serve: {error}")
    if options.json:
        options.json.write_text(json.dumps(measured.as_dict(), indent=1) + "\n")
    if not options.markdown:
        print(describe(measured))
    print(table(measured.measurements))
    if not options.markdown:
        print("\n".join(["", *notes(measured.measurements)]))
    return 1 if any(one.num_failed for one in measured.measurements) else 0


def describe(measured: Measured) -> str:
    """When, where, and under what load."""
    target = measured.target
    extras = [name for name, is_taken in (("ignore_eos", target.takes_ignore_eos),
                                          ("include_usage", target.takes_include_usage)) if not is_taken]  # fmt: skip
    refused = f"; not taken by the server: {', '.join(extras)}" if extras else ""
    load = " ".join(f"{value:.2f}" for value in measured.load_average)
    return (
        f"{measured.started}; {measured.machine}\n"
        f"load average before: {load}; {target.model} by {target.path}, seed {measured.seed}{refused}\n"
    )


def _with_descendants(pids: Sequence[int]) -> set[int]:
    from pdserve.process import descendants

    return set(pids).union(*map(descendants, pids))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
