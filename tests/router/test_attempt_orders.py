"""Events of the two streams in every order, with every failure in between, on a clock that leaps.

Streams are played in memory: hundreds of requests a second, seconds of waiting in no time.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.sampling import SamplingParams
from pdserve_wire.errors import PdserveError, Reason, Refused, Unavailable
from pdserve_wire.messages import (
    Accepted,
    First,
    KvHandoff,
    PrefillTimings,
    Started,
    Token,
    Tokens,
    WorkerHello,
    WorkerLoad,
    WorkerRequest,
)
from pdserve_wire.timeline import RequestTimeline
from router.attempt import MAX_PULLS
from router.dispatcher import Dispatcher, DispatchOptions
from router.fleet import Fleet, Worker
from router.generation import GenerationRequest
from tests.router.played_workers import KV_COMPLETE, LAYOUT, PROMPT, TOKEN

TIMEOUT_S = 10_000.0
MAX_TOKENS = 4
OPTIONS = DispatchOptions()


class LeapingSelector(selectors.SelectSelector):
    """Never waits: time leaps to the next timer. Without one, nothing can ever happen again: a hang."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everybody waits, and for nothing"
        self.now += max(timeout, 0.0)
        return super().select(0)


class LeapingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._leaping = LeapingSelector()
        super().__init__(self._leaping)

    def time(self) -> float:
        return self._leaping.now

    @property
    def num_timers(self) -> int:
        return sum(not timer.cancelled() for timer in self._scheduled)  # type: ignore[attr-defined]


# A step of a script: an event by name, tokens as (offset from the next one, how many), or an end.
PREFILL_STEPS = ("started", "first", "other first", "last first", "empty first")
DECODE_STEPS = ("accepted", "kv complete", (0, 1), (0, 2), (-1, 2), (0, 0), (1, 1), (0, MAX_TOKENS))
ENDS = ("end", "hang", "crash", *(reason for reason in Reason))
HONEST = {
    "prefill": ("started", "first", "hang"),
    "decode": ("accepted", "kv complete", *[(0, 1)] * MAX_TOKENS, "end"),
}


@dataclass(eq=False)
class PlayedStream:
    """The `EventStream` of one call, which says its next event when it is told to."""

    request: WorkerRequest
    script: tuple[Any, ...]
    is_closed: bool = False
    is_waiting: bool = False
    turn: asyncio.Event = field(default_factory=asyncio.Event)

    def close(self) -> None:
        self.is_closed = True

    async def __aiter__(self) -> AsyncIterator[Any]:
        next_index = self.request.num_emitted_tokens
        for step in self.script:
            if step == "hang":
                await asyncio.get_running_loop().create_future()
            self.is_waiting = True
            await self.turn.wait()
            self.turn.clear()
            self.is_waiting = False
            if step == "end":
                return
            if step == "crash":
                raise AttributeError("a bug")
            if isinstance(step, Reason):
                raise Refused("no") if step is Reason.REFUSED else Unavailable(step, "no")
            event, next_index = self._event(step, next_index)
            yield event

    def _event(self, step: Any, next_index: int) -> tuple[Any, int]:
        def token(index: int, token_id: int | None = None, finish_reason: str | None = None) -> Token:
            is_last = index + 1 >= self.request.sampling.max_tokens
            token_id = 1000 + index if token_id is None else token_id
            return Token(index, token_id, finish_reason=finish_reason or ("length" if is_last else None))

        first_index = self.request.num_emitted_tokens
        match step:
            case "started":
                handoff = KvHandoff(f"h{self.request.generation}", "a:1", 1, len(self.request.token_ids), LAYOUT)
                return Started(handoff), next_index
            case "first":
                return First((token(first_index),), PrefillTimings()), next_index
            case "other first":
                return First((token(first_index, 7),), PrefillTimings()), next_index
            case "last first":
                return First((token(first_index, None, "stop"),), PrefillTimings()), next_index
            case "empty first":
                return First((), PrefillTimings()), next_index
            case "accepted":
                return Accepted(), next_index
            case "kv complete":
                return KV_COMPLETE, next_index
            case (offset, count):
                begin = max(0, next_index + offset)
                return Tokens(tuple(token(index) for index in range(begin, begin + count))), begin + count
        raise AssertionError(step)


@dataclass
class PlayedFleet:
    """Two workers of each role; each call takes the next script of its role, and an honest one after those."""

    scripts: dict[str, list[tuple[Any, ...]]]
    streams: list[PlayedStream] = field(default_factory=list)
    pulls: list[tuple[int, int]] = field(default_factory=list)  # generation, pull_attempt

    def __post_init__(self) -> None:
        self.fleet = Fleet("router", TOKEN)
        for role in ("prefill", "decode"):
            for number in range(2):
                worker_id = f"{role}{number}"
                hello = WorkerHello(worker_id, role, "a:1", "", "", 1, 1, "m", 128, LAYOUT)
                self.fleet._workers[worker_id] = Worker(hello, self, WorkerLoad(is_ready=True))  # type: ignore[arg-type]

    def prefill(self, request: WorkerRequest) -> PlayedStream:
        return self._open("prefill", request)

    def decode(self, request: WorkerRequest, handoff: KvHandoff | None, pull_attempt: int) -> PlayedStream:
        assert (handoff is None) or handoff.handoff_id == f"h{request.generation}"
        self.pulls.append((request.generation, pull_attempt))
        return self._open("decode", request)

    def _open(self, role: str, request: WorkerRequest) -> PlayedStream:
        scripts = self.scripts[role]
        self.streams.append(PlayedStream(request, scripts.pop(0) if scripts else HONEST[role]))
        return self.streams[-1]

    def beat(self) -> None:
        for worker in self.fleet.workers:
            worker.is_suspect = False


@dataclass(frozen=True)
class Story:
    """What happens to one request."""

    prefill: list[tuple[Any, ...]]
    decode: list[tuple[Any, ...]]
    order: list[int]  # which of the streams that can speak does, turn by turn; -1: none, and time passes
    leaves_after: int | None = None  # turns
    is_slow: bool = False


def scripts(steps: tuple[Any, ...]) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    script = st.tuples(st.lists(st.sampled_from(steps), max_size=6), st.sampled_from(ENDS))
    return st.lists(script.map(lambda drawn: (*drawn[0], drawn[1])), max_size=5)


def nearly_honest(role: str) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """An honest worker that is cut off somewhere."""
    cut = st.tuples(st.integers(0, len(HONEST[role]) - 1), st.sampled_from(ENDS))
    return st.lists(cut.map(lambda drawn: (*HONEST[role][: drawn[0]], drawn[1])), max_size=5)


STORIES = st.builds(
    Story,
    prefill=nearly_honest("prefill") | scripts(PREFILL_STEPS),
    decode=nearly_honest("decode") | scripts(DECODE_STEPS),
    order=st.lists(st.integers(-1, 3), min_size=1, max_size=12).filter(lambda order: max(order) >= 0),
    leaves_after=st.none() | st.integers(0, 12),
    is_slow=st.booleans(),
)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STORIES)
@example(Story([], [], [0]))
@example(Story([("started", "started", "first", "hang")], [], [0]))
@example(Story([("started", "first", Reason.INTERNAL)], [("accepted", "kv complete", "hang")], [0, 1]))
@example(Story([("started", "hang")], [("accepted", (0, 2), (-1, 2), (1, 1), "hang")], [0]))
@example(Story([("started", "hang")] * 4, [("accepted", Reason.KV_LOST)] * 20, [0]))
@example(Story([("crash",)], [("crash",)] * 9, [0]))
@example(Story([("empty first", "first", "started", "hang")], [("accepted", "hang")], [0]))
def test_in_any_order_of_events_the_client_gets_each_token_once_or_an_error(story: Story) -> None:
    logging.disable()  # thousands of lines of what is meant to happen
    try:
        with asyncio.Runner(loop_factory=LeapingLoop) as runner:
            runner.run(play(story))
    finally:
        logging.disable(logging.NOTSET)


async def play(story: Story) -> None:
    made = PlayedFleet({"prefill": list(story.prefill), "decode": list(story.decode)})
    dispatcher = Dispatcher(made.fleet, OPTIONS)
    received: list[Token] = []
    client = asyncio.create_task(read(dispatcher, story, received))
    loop = asyncio.get_running_loop()
    assert isinstance(loop, LeapingLoop)
    num_turns = 0
    while not client.done():
        assert loop.time() <= TIMEOUT_S + 1, "a request outlived its deadline"
        await settle()
        speakers = [stream for stream in made.streams if stream.is_waiting and not stream.is_closed]
        if num_turns == story.leaves_after:
            client.cancel()
        elif speakers and (turn := story.order[num_turns % len(story.order)]) >= 0:
            speakers[turn % len(speakers)].turn.set()
        else:
            made.beat()
            await asyncio.wait([client], timeout=4.0 if speakers else TIMEOUT_S / 20)
        num_turns += 1
    await settle()
    check_end(client, received)
    assert all(stream.is_closed for stream in made.streams)
    assert not any(worker.num_in_flight for worker in made.fleet.workers) and not dispatcher.num_in_flight
    assert asyncio.all_tasks() == {asyncio.current_task()} and not loop.num_timers
    check_opened(made, received)
    if loop.time() >= TIMEOUT_S:  # only a worker that says nothing may bring a request that far
        assert any(stream.script[-1] == "hang" for stream in made.streams)


async def read(dispatcher: Dispatcher, story: Story, received: list[Token]) -> None:
    request = GenerationRequest("r", PROMPT, SamplingParams(max_tokens=MAX_TOKENS), "m", TIMEOUT_S)
    async with aclosing(dispatcher.generate(request, RequestTimeline("r"))) as batches:
        async for batch in batches:
            assert batch
            received.extend(batch)
            if story.is_slow:
                await asyncio.sleep(0.5)


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def check_end(client: asyncio.Task[None], received: list[Token]) -> None:
    assert [token.index for token in received] == list(range(len(received)))
    assert all(token.finish_reason is None for token in received[:-1])
    if not client.cancelled():
        error = client.exception()
        if error is None:
            assert received[-1].finish_reason is not None
        else:
            assert isinstance(error, PdserveError) and error.message, repr(error)


def check_opened(made: PlayedFleet, received: list[Token]) -> None:
    """Calls are bounded, and each carries the prompt and what the client had by then."""
    assert len(made.pulls) == len(set(made.pulls)) <= OPTIONS.max_attempts * MAX_PULLS
    emitted = [token.token_id for token in received]
    for stream in made.streams:
        request = stream.request
        assert request.token_ids == (*PROMPT, *emitted[: request.num_emitted_tokens])
        assert request.num_prompt_tokens == len(PROMPT) and request.generation < OPTIONS.max_attempts
