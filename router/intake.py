"""What both fronts do with a request before anything is computed: check it and turn it into tokens.

RequestError          the client must change something; the message says what
  +- InvalidRequest   a field is wrong, or the prompt is too long (400)
  +- UnknownModel     (404)
  +- NotAuthorized    (401)
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.sampling import InvalidSampling, SamplingParams
from pdserve_wire.deadlines import DEADLINES
from router.generation import GenerationRequest
from router.served_model import ServedModel
from router.text.errors import EncodeError, TemplateError

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_TOKEN_RULES = 1024  # entries of logit_bias, and of stop_token_ids
_INLINE_CHARS = 4096  # a longer text is tokenized in a thread: about 1 us a character
_CHARS_A_MESSAGE = 32  # what rendering one costs beside its text
_CHARS_A_BYTE = 4  # a normalizer may make one character of several


class RequestError(Exception):
    """`param` is the field at fault, if it is one; `code` a word that a program can act on."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(RequestError):
    """The request can't be served as it is."""


class UnknownModel(RequestError):
    """No such model here."""


class NotAuthorized(RequestError):
    """The caller has not shown a key."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages as plain JSON data, each with a role."""

    messages: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """A client's wish, its types checked but not yet held against the model.

    `max_tokens` and `seed` stand beside `sampling`, whose own are not read: None means that the
    client named none. `default_max_tokens` is None for all the room that is left.
    """

    model: str
    prompt: str | tuple[int, ...] | ChatPrompt
    sampling: SamplingParams
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    seed: int | None = None
    stops: tuple[str, ...] = ()
    timeout_s: float = DEADLINES.request_s


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be generated, and the stop strings, which stay with the router."""

    request: GenerationRequest
    stops: tuple[str, ...]


class Intake:
    """Holds asks against one model."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    def check_model(self, name: str) -> None:
        """Raise `UnknownModel` for any name but the served one."""
        if name != self.model.name:
            raise UnknownModel(
                f"the model {name!r} does not exist here; use {self.model.name!r}", "model", "model_not_found"
            )

    async def prepare(self, ask: Ask, request_id: str) -> Prepared:
        """Check everything and tokenize. Raises `RequestError`."""
        self.check_model(ask.model)
        _check_stops(ask.stops)
        token_ids = await self._tokenize(ask.prompt)
        sampling = self._sampling(ask, len(token_ids))
        request = GenerationRequest(request_id, token_ids, sampling, self.model.name, ask.timeout_s)
        return Prepared(request, ask.stops)

    async def _tokenize(self, prompt: str | tuple[int, ...] | ChatPrompt) -> tuple[int, ...]:
        """At least one token id, each in the vocabulary."""
        if isinstance(prompt, tuple):
            if not prompt:
                raise InvalidRequest("the prompt is empty; give at least one token", "prompt")
            self.check_room(len(prompt), "prompt")
            self._check_ids(prompt, "prompt")
            return prompt
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one character", "prompt")
        field = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        try:
            if _num_chars(prompt) <= _INLINE_CHARS:
                token_ids = self._encode(prompt)
            else:
                token_ids = await asyncio.to_thread(self._encode, prompt)
        except (EncodeError, TemplateError) as error:
            raise InvalidRequest(str(error), field) from error
        if not token_ids:
            raise InvalidRequest("the prompt has no tokens; give it some text", field)
        return token_ids

    def _encode(self, prompt: str | ChatPrompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self._check_num_chars(prompt, "prompt")
            return tuple(self.model.tokenizer.encode(prompt))
        if self.model.chat_template is None:
            raise InvalidRequest(f"{self.model.name!r} has no chat template; use /v1/completions", "model")
        text = self.model.chat_template.render(prompt.messages)
        self._check_num_chars(text, "messages")
        return tuple(self.model.tokenizer.encode(text, add_special_tokens=False))

    def _check_num_chars(self, text: str, field: str) -> None:
        """Refuse what is too long whatever its tokens are, before time is spent on it."""
        limit = self.model.max_model_len * self.model.tokenizer.longest_token_nbytes * _CHARS_A_BYTE
        if len(text) > limit:
            raise self._too_long(f"{len(text)} characters", field)

    def _too_long(self, size: str, field: str) -> InvalidRequest:
        return InvalidRequest(
            f"the prompt has {size}; {self.model.name!r} takes at most {self.model.max_model_len} tokens, prompt "
            "and reply together, and the reply needs at least one; shorten the prompt",
            field,
            "context_length_exceeded",
        )

    def check_room(self, num_prompt_tokens: int, field: str) -> int:
        """How many tokens the reply can have. Raises `InvalidRequest` where there is no room for one."""
        room = self.model.max_model_len - num_prompt_tokens
        if room < 1:
            raise self._too_long(f"{num_prompt_tokens} tokens", field)
        return room

    def _sampling(self, ask: Ask, num_prompt_tokens: int) -> SamplingParams:
        room = self.check_room(num_prompt_tokens, "messages" if isinstance(ask.prompt, ChatPrompt) else "prompt")
        if ask.max_tokens is not None and ask.max_tokens > room:
            raise InvalidRequest(
                f"max_tokens is {ask.max_tokens}, but a prompt of {num_prompt_tokens} tokens leaves room for {room} of "
                f"the model's {self.model.max_model_len}; lower max_tokens to {room} or shorten the prompt",
                "max_tokens",
                "context_length_exceeded",
            )
        max_tokens = ask.max_tokens
        if max_tokens is None:
            max_tokens = room if ask.default_max_tokens is None else min(ask.default_max_tokens, room)
        sampling = dataclasses.replace(
            ask.sampling,
            max_tokens=max_tokens,
            seed=secrets.randbits(63) if ask.seed is None else ask.seed,
            top_k=min(ask.sampling.top_k, self.model.vocab_size),
        )
        for field, token_ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", tuple(sampling.logit_bias)),
        ):
            if len(token_ids) > MAX_TOKEN_RULES:
                raise InvalidRequest(f"{field} names {len(token_ids)} tokens; name at most {MAX_TOKEN_RULES}", field)
            self._check_ids(token_ids, field)
        try:
            sampling.validate()
        except InvalidSampling as error:  # its first word is the field's name
            raise InvalidRequest(str(error), str(error).split(maxsplit=1)[0]) from error
        return sampling

    def _check_ids(self, token_ids: tuple[int, ...], field: str) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.model.vocab_size:
            stranger = next(token_id for token_id in token_ids if not 0 <= token_id < self.model.vocab_size)
            raise InvalidRequest(
                f"{field}: token id {stranger} is outside the vocabulary; use 0 to {self.model.vocab_size - 1}", field
            )


def _num_chars(prompt: str | ChatPrompt) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    texts = (value for message in prompt.messages for value in message.values() if isinstance(value, str))
    return sum(map(len, texts)) + _CHARS_A_MESSAGE * len(prompt.messages)


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings; give at most {MAX_STOPS}", "stop")
    for stop in stops:
        if not stop:
            raise InvalidRequest("stop holds an empty string; leave it out", "stop")
        if len(stop) > MAX_STOP_CHARS:
            raise InvalidRequest(f"stop holds a string of {len(stop)} characters; use {MAX_STOP_CHARS} at most", "stop")
