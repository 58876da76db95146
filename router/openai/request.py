"""A JSON body to a checked `Ask`: what both generation routes read in the same way."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from aiohttp import web

from engine.sampling import SamplingParams
from router.intake import InvalidRequest
from router.openai.errors import BodyTooLarge, BodyTooSlow
from router.openai.limits import HttpLimits
from router.scope import ClientGone


class Fields:
    """A JSON object's fields with their types checked; `null` counts as absent, as OpenAI has it.

    Each method raises `InvalidRequest` that names the field and says what it must be.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def get(self, name: str) -> Any:
        """The value as it came, or None."""
        return self._body.get(name)

    def string(self, name: str) -> str:
        value = self._body.get(name)
        if not isinstance(value, str):
            _refuse(name, "is required and must be a string")
        return value

    def integer(self, name: str) -> int | None:
        value = self._body.get(name)
        if value is not None and not _is_integer(value):
            _refuse(name, "must be an integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._body.get(name)
        return default if value is None else _number(name, value)

    def boolean(self, name: str) -> bool:
        value = self._body.get(name)
        if value is not None and not isinstance(value, bool):
            _refuse(name, "must be true or false")
        return bool(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self._body.get(name)
        if value is not None and not isinstance(value, dict):
            _refuse(name, "must be an object")
        return value or {}

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self._body.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(map(_is_integer, value)):
            _refuse(name, "must be a list of token ids")
        return tuple(value)

    def stops(self) -> tuple[str, ...]:
        value = self._body.get("stop")
        stops = [value] if isinstance(value, str) else value or []
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            _refuse("stop", "must be a string or a list of strings")
        return tuple(stops)


async def read_body(http: web.Request, limits: HttpLimits) -> bytes:
    """The whole body, bounded in size and time. Raises `BodyTooLarge`, `BodyTooSlow` or `InvalidRequest`."""
    too_large = BodyTooLarge(f"the body is larger than {limits.max_body_nbytes} bytes; make it smaller")
    if (http.content_length or 0) > limits.max_body_nbytes:
        raise too_large
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await http.read()
    except TimeoutError as error:
        raise BodyTooSlow(f"the body did not arrive within {limits.body_timeout_s:g} s; make it smaller") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large from error
    except ConnectionError as error:
        raise ClientGone("the client left before its body was here") from error
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"the body can't be read: {error}") from error


def parse_object(body: bytes) -> Fields:
    """A JSON object in UTF-8, with no NaN or Infinity, or `InvalidRequest`."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (byte {error.start}); encode it as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return Fields(value)


def read_sampling(fields: Fields, logprobs: int | None) -> SamplingParams:
    """All that `SamplingParams` has but `max_tokens` and `seed`. Ranges are checked by the intake."""
    return SamplingParams(
        min_tokens=fields.integer("min_tokens") or 0,
        temperature=fields.number("temperature", 1.0),
        top_p=fields.number("top_p", 1.0),
        top_k=_top_k(fields),
        min_p=fields.number("min_p", 0.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0),
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        logit_bias=_logit_bias(fields),
        stop_token_ids=fields.token_ids("stop_token_ids"),
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=logprobs,
    )


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """Whether to stream, and whether the stream ends with the usage."""
    is_stream = fields.boolean("stream")
    options = Fields(fields.mapping("stream_options"))
    if fields.get("stream_options") is not None and not is_stream:
        _refuse("stream_options", "is for streams; set stream to true or leave it out")
    if options.boolean("continuous_usage_stats"):
        _refuse("stream_options", "continuous_usage_stats is not supported; use include_usage")
    return is_stream, options.boolean("include_usage")


def _is_off(value: Any) -> bool:
    return not value


def _is_one(value: Any) -> bool:
    return value == 1 and not isinstance(value, bool)


# what would change the answer and isn't built: the field, and the values that change nothing
_UNSUPPORTED: Mapping[str, Callable[[Any], bool]] = {
    "n": _is_one,
    "best_of": _is_one,
    "response_format": lambda value: value == {"type": "text"},
    "modalities": lambda value: value == ["text"],
    "tool_choice": lambda value: value in ("none", "auto"),
    "add_generation_prompt": lambda value: value is True,
    "add_special_tokens": lambda value: value is True,
    "skip_special_tokens": lambda value: value is True,
    "spaces_between_special_tokens": lambda value: isinstance(value, bool),
} | dict.fromkeys(
    (
        "tools",
        "functions",
        "function_call",
        "audio",
        "suffix",
        "echo",
        "prediction",
        "web_search_options",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "prompt_embeds",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "use_beam_search",
        "length_penalty",
        "include_stop_str_in_output",
        "allowed_token_ids",
        "bad_words",
        "logits_processors",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    ),
    _is_off,
)


def refuse_unsupported(fields: Fields) -> None:
    """Refuse the known fields that would change the answer; unknown ones are ignored, as elsewhere in the field."""
    for name, is_harmless in _UNSUPPORTED.items():
        value = fields.get(name)
        if value is not None and not is_harmless(value):
            only = " (only 1 is)" if is_harmless is _is_one else ""
            _refuse(name, f"with this value is not supported{only}; leave it out")


def _refuse(name: str, problem: str) -> NoReturn:
    raise InvalidRequest(f"{name} {problem}", name)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(name, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):  # 1e999 is JSON too
        _refuse(name, "is too large")
    return number


def _top_k(fields: Fields) -> int:
    top_k = fields.integer("top_k") or 0
    return 0 if top_k == -1 else top_k  # both are "off" in the field


def _logit_bias(fields: Fields) -> Mapping[int, float]:
    bias: dict[int, float] = {}
    for key, value in fields.mapping("logit_bias").items():
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            _refuse("logit_bias", f"must have token ids as keys, not {key[:40]!r}")
        bias[int(key)] = _number("logit_bias", value)
    return MappingProxyType(bias)
