"""What the router's tests are made of: a scripted generator, a front, a real server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import openai

from engine.sampling import SamplingParams
from pdserve_wire.messages import PrefillTimings, Token
from pdserve_wire.timeline import RequestTimeline
from router.access import ApiKeys
from router.front import Front
from router.generation import GenerationRequest
from router.health import Probes
from router.intake import Intake, Prepared
from router.metrics import RouterMetrics
from router.openai.app import http_server, make_app
from router.openai.limits import HttpLimits
from router.reply import Piece, open_reply
from router.served_model import ServedModel

MODEL = "smol"
EOS = 2

# an event of the generator, a failure, or something to wait for
Step = tuple[Token, ...] | Exception | asyncio.Event
Script = Callable[[GenerationRequest], Iterable[Step]]


class ScriptedGenerator:
    """Plays a script for each request, and remembers what became of it."""

    def __init__(self, script: Script | Iterable[Step]) -> None:
        steps = () if callable(script) else tuple(script)
        self._script: Script = script if callable(script) else lambda request: steps
        self.requests: list[GenerationRequest] = []
        self.num_open = 0
        self.num_aborted = 0
        self.num_events = 0
        self.all_closed = asyncio.Event()
        self.prefill = PrefillTimings()

    async def generate(
        self, request: GenerationRequest, timeline: RequestTimeline
    ) -> AsyncGenerator[tuple[Token, ...], None]:
        self.requests.append(request)
        self.num_open += 1
        self.all_closed.clear()
        is_finished = False
        timeline.admitted_at = time.monotonic()
        timeline.decision = "remote"
        try:
            for step in self._script(request):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                    continue
                timeline.prefill = self.prefill
                timeline.token_times += [time.monotonic()] * len(step)
                self.num_events += 1
                is_finished = step[-1].finish_reason is not None
                yield step
        finally:
            self.num_open -= 1
            self.num_aborted += not is_finished
            if not self.num_open:
                self.all_closed.set()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a state that nothing announces."""
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.002)


def make_tokens(token_ids: Iterable[int], finish_reason: str | None = None, first_index: int = 0) -> tuple[Token, ...]:
    tokens = [Token(first_index + place, token_id) for place, token_id in enumerate(token_ids)]
    if tokens:
        tokens[-1] = replace(tokens[-1], finish_reason=finish_reason)
    return tuple(tokens)


def one_by_one(token_ids: Iterable[int], finish_reason: str = "length") -> list[tuple[Token, ...]]:
    """Events of one token each, the last with the finish reason."""
    return [(token,) for token in make_tokens(token_ids, finish_reason)]


def saying(model: ServedModel, text: str, finish_reason: str = "length") -> ScriptedGenerator:
    """A generator that says `text`, token by token."""
    return ScriptedGenerator(one_by_one(model.tokenizer.encode(text), finish_reason))


@cache
def load_model(folder: Path, max_model_len: int = 128) -> ServedModel:
    return ServedModel.load(folder, MODEL, max_model_len)


def make_front(model: ServedModel, generator: ScriptedGenerator, api_keys: tuple[str, ...] = ()) -> Front:
    return Front(Intake(model), generator, RouterMetrics(model.name), api_keys=ApiKeys(api_keys))


async def no_ledger() -> dict[str, Any]:
    return {}


def make_probes(**fields: Any) -> Probes:
    """Ready, and with nothing to tell."""
    return Probes(**({"why_not_ready": lambda: None, "ledger": no_ledger, "status": dict} | fields))


@dataclass(frozen=True, slots=True)
class Served:
    """A router front that listens."""

    front: Front
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def counted(self) -> dict[str, float]:
        """Ended requests by outcome, those outcomes that there are, and the requests in flight."""
        return counted(self.front.metrics)


@asynccontextmanager
async def serving(
    front: Front, probes: Probes | None = None, limits: HttpLimits | None = None
) -> AsyncIterator[Served]:
    limits = limits or HttpLimits(shutdown_s=1.0)
    app = make_app(front, probes or make_probes(), limits)
    async with http_server(app, "127.0.0.1", 0, limits) as port:
        yield Served(front, port)


@asynccontextmanager
async def client_of(served: Served, api_key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=api_key, max_retries=0, timeout=20) as client:
        yield client


def counted(metrics: RouterMetrics) -> dict[str, float]:
    outcomes = {
        sample.labels["outcome"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "pdserve_requests_total" and sample.value
    }
    in_flight = metrics.registry.get_sample_value("pdserve_requests_in_flight", {"model_name": metrics.model_name})
    return outcomes | {"in flight": in_flight or 0.0}


@dataclass(frozen=True, slots=True)
class RawResponse:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        found = json.loads(self.body)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return dict(found)


def raw_request(body: bytes, path: str = "/v1/completions", headers: str = "", method: str = "POST") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


async def send_raw(port: int, request: bytes) -> RawResponse:
    """Send bytes on a connection of its own and read until the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return parse_response(await asyncio.wait_for(reader.read(), 20))
    finally:
        writer.close()
        await writer.wait_closed()


def parse_response(answer: bytes) -> RawResponse:
    head, _, body = answer.partition(b"\r\n\r\n")
    status_line, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(chunks_of(body))
    return RawResponse(int(status_line.split()[1]), headers, body)


def chunks_of(body: bytes) -> list[bytes]:
    """The chunks of a chunked body: what was written at once."""
    chunks = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        chunks.append(rest[:length])
        body = rest[length + 2 :]
    return chunks


async def post(port: int, body: Any, path: str = "/v1/completions", headers: str = "") -> RawResponse:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await send_raw(port, raw_request(data, path, headers))


def events_of(body: bytes) -> list[Any]:
    """The data of each server-sent event, as JSON but for [DONE]."""
    events = body.decode("utf-8").split("\n\n")
    assert events.pop() == "", "the body ends inside an event"
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    data = [event.removeprefix("data: ") for event in events]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


async def pieces_of(
    model: ServedModel,
    events: Iterable[tuple[Token, ...]],
    stops: tuple[str, ...] = (),
    sampling: SamplingParams | None = None,
) -> list[Piece]:
    request = GenerationRequest("r", (1,), sampling or SamplingParams(), model.name)
    reply = open_reply(ScriptedGenerator(events), Prepared(request, stops), RequestTimeline("r"), model.tokenizer)
    return [piece async for piece in reply]
