"""A whole measurement of a small real server, and the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks import serve
from benchmarks.client import Ask, NoServer, Target
from benchmarks.prompts import Prompts
from benchmarks.serve import Plan, measure
from benchmarks.workload import LongPrompts
from tests.benchmarks.makers import DONE, Script, chunk, make_workload, openai_server, usage_chunk


class CountingServer:
    """Answers each request with as many tokens as it asks for, `pause_s` before each; counts words as tokens."""

    def __init__(self, pause_s: float = 0.0, tokens_per_word: int = 1) -> None:
        self.prompts: list[str] = []
        self._pause_s = pause_s
        self._tokens_per_word = tokens_per_word

    def __call__(self, body: Mapping[str, Any]) -> Script:
        self.prompts.append(body["prompt"])
        num_tokens = body["max_tokens"]
        ends = [None] * (num_tokens - 1) + ["length"]
        tokens = [step for end in ends for step in (self._pause_s, chunk("x", end))]
        return [*tokens, usage_chunk(num_tokens, len(body["prompt"].split()) * self._tokens_per_word), DONE]


async def test_every_stream_asks_again_until_all_requests_are_answered() -> None:
    server = CountingServer()
    async with openai_server(server) as url:
        workload = make_workload("3", num_streams=3, num_requests=7)
        measured = await measure(Target(url, ""), Plan((workload,), num_repeats=2, num_warmup=0), "small")
    (found,) = measured.measurements
    assert [(each.num_requests, each.num_failed, each.num_tokens) for each in found.rounds] == [(7, 0, 28)] * 2
    assert len(server.prompts) == 1 + 2 * 7  # the first is the probe
    assert measured.target.model == "small"


async def test_streams_run_at_the_same_time() -> None:
    async with openai_server(CountingServer(pause_s=0.05)) as url:
        workload = make_workload("8", num_streams=8, num_requests=8, ask=Ask(max_tokens=4))
        measured = await measure(Target(url, "small"), Plan((workload,), num_repeats=1, num_warmup=0), "small")
    (figures,) = measured.measurements[0].rounds
    assert 0.2 <= figures.duration_s < 8 * 0.2
    assert figures.itl is not None and figures.itl.p50 >= 0.045
    assert figures.ttft is not None and figures.ttft.p50 >= 0.045


async def test_prompts_are_all_different_from_their_first_words_on() -> None:
    server = CountingServer()
    async with openai_server(server) as url:
        plan = Plan((make_workload("1", num_requests=20), make_workload("2", num_requests=20)), seed=5)
        await measure(Target(url, "small"), plan, "small")
    beginnings = {tuple(prompt.split()[:4]) for prompt in server.prompts}
    assert len(beginnings) == len(server.prompts)


async def test_prompts_have_about_the_length_that_was_asked_for() -> None:
    server = CountingServer(tokens_per_word=3)
    async with openai_server(server) as url:
        plan = Plan((make_workload(prompt_tokens=75),), num_repeats=1, num_warmup=0)
        measured = await measure(Target(url, "small"), plan, "small")
    assert measured.measurements[0].rounds[0].prompt_tokens == 75


def test_the_same_seed_gives_the_same_prompts() -> None:
    first, same, other = Prompts(1), Prompts(1), Prompts(2)
    series = [[prompts.make(20) for _ in range(3)] for prompts in (first, same, other)]
    assert series[0] == series[1] != series[2]


async def test_failures_are_counted_and_the_rest_is_measured() -> None:
    num_asked = 0

    def answer(body: Mapping[str, Any]) -> Script | web.Response:
        nonlocal num_asked
        num_asked += 1
        return web.Response(status=500, text="oh") if num_asked % 2 == 0 else CountingServer()(body)

    async with openai_server(answer) as url:
        plan = Plan((make_workload(num_requests=6),), num_repeats=1, num_warmup=0)
        measured = await measure(Target(url, "small"), plan, "small")
    (figures,) = measured.measurements[0].rounds
    assert (figures.num_failed, figures.failures) == (3, {"HTTP 500: oh": 3})
    assert figures.num_tokens == 3 * 4


async def test_a_warm_up_is_not_counted() -> None:
    server = CountingServer()
    async with openai_server(server) as url:
        plan = Plan((make_workload(num_streams=3, num_requests=3),), num_repeats=1)
        measured = await measure(Target(url, "small"), plan, "small")
    assert len(server.prompts) == 1 + 3 + 3
    assert measured.measurements[0].num_requests == 3


async def test_long_prompts_arrive_beside_the_streams_and_are_counted_apart() -> None:
    server = CountingServer(pause_s=0.005)
    async with openai_server(server) as url:
        workload = make_workload(
            num_requests=0,
            prompt_tokens=10,
            duration_s=0.4,
            long_prompts=LongPrompts(300, interval_s=0.1, max_tokens=2),
        )
        measured = await measure(Target(url, "small"), Plan((workload,), num_repeats=1, num_warmup=0), "small")
    (figures,) = measured.measurements[0].rounds
    assert figures.long_prompts is not None
    assert figures.long_prompts.num_requests >= 2 and figures.long_prompts.num_failed == 0
    assert figures.prompt_tokens == 10  # of the streams alone
    assert figures.duration_s >= 0.4


async def test_a_server_that_is_not_there_can_not_be_measured() -> None:
    async with openai_server(lambda body: [DONE]) as url:
        pass
    with pytest.raises(NoServer):
        await measure(Target(url, "small"), Plan((make_workload(),)), "small")


async def test_the_command_prints_a_table_and_writes_all_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with openai_server(CountingServer()) as url:
        arguments = ["--url", url, "--streams=1,2", "--requests-per-stream=1", "--repeat=2", "--label=tiny"]
        arguments += ["--max-tokens=4", "--prompt-tokens=9", "--long-prompts=2", "--long-prompt-tokens=50"]
        code = await asyncio.to_thread(serve.main, [*arguments, "--json", str(tmp_path / "out.json"), "--seed=3"])
    assert code == 0
    printed = capsys.readouterr().out
    rows = [line.split("|")[1:4] for line in printed.splitlines() if line.startswith("| tiny")]
    assert [(label.strip(), streams.strip()) for label, streams, _ in rows] == [
        ("tiny", "1"),
        ("tiny", "2"),
        ("tiny", "2 of 50 tokens"),
    ]
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["seed"] == 3
    assert [len(each["rounds"]) for each in written["measurements"]] == [2, 2, 2]
    assert written["measurements"][0]["rounds"][0]["cpu"]["client_s"] > 0


async def test_the_command_fails_where_requests_failed() -> None:
    asked: list[object] = []

    def answer(body: Mapping[str, Any]) -> Script | web.Response:
        asked.append(body)
        return CountingServer()(body) if len(asked) == 1 else web.Response(status=503)

    async with openai_server(answer) as url:
        arguments = ["--url", url, "--streams=1", "--requests-per-stream=1", "--repeat=1", "--warmup=0"]
        assert await asyncio.to_thread(serve.main, arguments) == 1
