"""The life of a generation request over HTTP, for both routes.

1. It arrives: its scope opens, which counts it exactly once, whatever happens.
2. The key, the body and its fields are checked (401, 408, 413, 400).
3. The intake holds it against the model and makes token ids of it (404, 400).
4. The generator is asked. The status is not sent before the first token is here, so that a refusal
   is still a status (400, 429, 503).
5. Pieces of text go to the client as they come, or are collected.
6. A finish reason, a failure or the client's leaving ends it; the generator is closed in every case,
   which aborts what still runs. A failure after the first token is one event without [DONE].
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from pdserve_wire.messages import Token
from pdserve_wire.timeline import RequestTimeline
from router.front import Front
from router.intake import Ask
from router.metrics import num_cached_tokens
from router.openai.errors import failure_body
from router.openai.limits import HttpLimits
from router.openai.request import Fields, parse_object, read_body, read_stream, refuse_unsupported
from router.openai.request_id import HEADER, name_request
from router.openai.sse import DONE, Chunks, EventStream, failure_event
from router.reply import Piece, open_reply
from router.scope import ClientGone, RequestScope
from router.text.tokenizer import Tokenizer

_INLINE_NBYTES = 64 << 10  # a larger body is read in a thread, so that streams go on meanwhile


class ReplyForm(Protocol):
    """How one route words the reply to one request. Strings are the members of a choice, as JSON."""

    def opening(self) -> str | None:
        """What comes before any text, if anything does."""

    def delta(self, text: str, tokens: tuple[Token, ...]) -> str | None:
        """Text and the log probabilities of tokens; None where there is nothing to tell."""

    def closing(self, finish_reason: str) -> str:
        """The last members, without text."""

    def whole(self, text: str, tokens: tuple[Token, ...], finish_reason: str) -> dict[str, Any]:
        """The choice of a reply that was not streamed."""


@dataclass(frozen=True, slots=True)
class GenerationRoute:
    """What is different between the two routes."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    parse: Callable[[Fields], Ask]
    make_form: Callable[[Tokenizer, Ask], ReplyForm]


@dataclass(frozen=True, slots=True)
class _Wish:
    """All that a body says."""

    ask: Ask
    is_stream: bool
    include_usage: bool


def _parse(body: bytes, route: GenerationRoute) -> _Wish:
    fields = parse_object(body)
    is_stream, include_usage = read_stream(fields)
    refuse_unsupported(fields)
    return _Wish(route.parse(fields), is_stream, include_usage)


async def serve(http: web.Request, front: Front, limits: HttpLimits, route: GenerationRoute) -> web.StreamResponse:
    """Answer one request. Failures before the reply begins are raised."""
    scope = front.open_scope(route.id_prefix, http.headers.get(HEADER))
    request_id = scope.timeline.request_id
    name_request(http, scope.public_id)
    with scope:
        front.api_keys.check(http.headers.get("Authorization", ""))
        body = await read_body(http, limits)
        wish = await asyncio.to_thread(_parse, body, route) if len(body) > _INLINE_NBYTES else _parse(body, route)
        ask, scope.is_stream = wish.ask, wish.is_stream
        prepared = await front.intake.prepare(ask, request_id)
        scope.prepared(prepared)
        model = front.intake.model
        form = route.make_form(model.tokenizer, ask)
        identity = {"id": request_id, "object": route.whole_object, "created": int(time.time()), "model": model.name}
        async with aclosing(open_reply(front.generator, prepared, scope.timeline, model.tokenizer)) as reply:
            first = await anext(reply)
            if not scope.is_stream:
                return await _whole(first, reply, form, identity, scope)
            chunks = Chunks(identity | {"object": route.chunk_object}, wish.include_usage)
            events = EventStream(http, limits)
            await events.open()
            try:
                await _stream(first, reply, _Wording(form, chunks, wish.include_usage), events, scope)
            except ClientGone:
                raise
            except Exception as error:
                scope.end("error")
                await events.send(failure_event(failure_body(error, request_id)))
            return events.response


async def _whole(
    piece: Piece, reply: AsyncGenerator[Piece, None], form: ReplyForm, identity: dict[str, Any], scope: RequestScope
) -> web.Response:
    texts = [piece.text]
    tokens = [*piece.tokens]
    while piece.finish_reason is None:
        piece = await anext(reply)
        texts.append(piece.text)
        tokens.extend(piece.tokens)
    choice = {"index": 0, **form.whole("".join(texts), tuple(tokens), piece.finish_reason)}
    usage = usage_of(scope.timeline, piece.num_tokens)
    scope.end(piece.finish_reason)
    scope.first_byte()
    body = json.dumps(identity | {"choices": [choice], "usage": usage})
    return web.Response(text=body, content_type="application/json")


@dataclass(frozen=True, slots=True)
class _Wording:
    """The words of a stream: the members of each choice, in the chunks around them."""

    form: ReplyForm
    chunks: Chunks
    include_usage: bool

    def opening(self) -> str:
        members = self.form.opening()
        return "" if members is None else self.chunks.choice(members)

    def delta(self, piece: Piece) -> str:
        members = self.form.delta(piece.text, piece.tokens)
        return "" if members is None else self.chunks.choice(members)

    def closing(self, finish_reason: str, usage: dict[str, Any]) -> str:
        last = self.chunks.choice(self.form.closing(finish_reason))
        return f"{last}{self.chunks.usage(usage) if self.include_usage else ''}{DONE}"


async def _stream(
    piece: Piece, reply: AsyncGenerator[Piece, None], wording: _Wording, events: EventStream, scope: RequestScope
) -> None:
    """One write for each event of the generator, and none where it brought nothing to tell."""
    told = wording.opening() + wording.delta(piece)
    while piece.finish_reason is None:
        if told:
            scope.first_byte()
            await events.send(told)
        piece = await anext(reply)
        told = wording.delta(piece)
    scope.end(piece.finish_reason)
    scope.first_byte()
    await events.send(told + wording.closing(piece.finish_reason, usage_of(scope.timeline, piece.num_tokens)))


def usage_of(timeline: RequestTimeline, num_tokens: int) -> dict[str, Any]:
    """Token counts in OpenAI's form. Tokens cut away by a stop string were generated, and count."""
    return {
        "prompt_tokens": timeline.num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": timeline.num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens(timeline)},
    }
