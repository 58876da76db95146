"""One request's answer as text: tokens come in, pieces of text go out."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from pdserve_wire.errors import Reason, Unavailable
from pdserve_wire.messages import Token
from pdserve_wire.timeline import RequestTimeline
from router.generation import Generator
from router.intake import Prepared
from router.text.text_stream import TextStream
from router.text.tokenizer import Tokenizer


class Piece(NamedTuple):
    """What one event of the generator adds to the answer.

    `num_tokens` counts all tokens up to here. `tokens` are those whose text the reader may know: a
    token that could begin a stop string comes with its text, later, and what a stop string cut away
    never comes.
    """

    text: str
    tokens: tuple[Token, ...]
    num_tokens: int
    finish_reason: str | None


async def open_reply(
    generator: Generator, prepared: Prepared, timeline: RequestTimeline, tokenizer: Tokenizer
) -> AsyncGenerator[Piece, None]:
    """Pieces up to the one with the finish reason; close it (`aclosing`) to abort the request.

    Raises what the generator raises, and `Unavailable` where it ends without a finish reason.
    """
    text_stream = TextStream(tokenizer, prepared.stops, prepared.request.sampling.min_tokens)
    shelf = _Shelf(text_stream) if prepared.stops else None
    num_tokens = 0
    async with aclosing(generator.generate(prepared.request, timeline)) as events:
        async for tokens in events:
            text = ""
            finish_reason: str | None = None
            num_before = num_tokens
            for token in tokens:
                num_tokens += 1
                added, finish_reason = text_stream.push(token.token_id, token.finish_reason)
                text += added
                if shelf is not None:
                    shelf.put(token)
                if finish_reason is not None:
                    break
            shown = tokens[: num_tokens - num_before] if shelf is None else shelf.take(finish_reason is not None)
            yield Piece(text, shown, num_tokens, finish_reason)
            if finish_reason is not None:
                return
    raise Unavailable(Reason.INTERNAL, "the generation ended without a finish reason; try again")


class _Shelf:
    """Tokens wait here until their text is let out."""

    def __init__(self, text_stream: TextStream) -> None:
        self._text_stream = text_stream
        self._waiting: deque[tuple[int, int, Token]] = deque()  # its text's start and end, the token
        self._num_chars = 0

    def put(self, token: Token) -> None:
        """Call it after the token was pushed."""
        end = self._text_stream.num_decoded_chars
        self._waiting.append((self._num_chars, end, token))
        self._num_chars = end

    def take(self, is_last: bool) -> tuple[Token, ...]:
        emitted = self._text_stream.num_emitted_chars
        if is_last and emitted < self._num_chars:  # cut by a stop string
            return tuple(token for start, _, token in self._waiting if start < emitted)
        shown: list[Token] = []
        while self._waiting and self._waiting[0][1] <= emitted:
            shown.append(self._waiting.popleft()[2])
        return tuple(shown)
