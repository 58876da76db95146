"""POST /v1/chat/completions"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pdserve_wire.messages import Token
from router.intake import Ask, ChatPrompt, InvalidRequest
from router.openai.logprobs import chat_logprobs
from router.openai.request import Fields, read_sampling
from router.openai.serve import GenerationRoute
from router.text.tokenizer import Tokenizer


def parse(fields: Fields) -> Ask:
    """Without a limit of its own, a reply may take all the room that the prompt leaves."""
    return Ask(
        model=fields.string("model"),
        prompt=ChatPrompt(_messages(fields.get("messages"))),
        sampling=read_sampling(fields, _logprobs(fields)),
        max_tokens=_max_tokens(fields),
        seed=fields.integer("seed"),
        stops=fields.stops(),
    )


def _max_tokens(fields: Fields) -> int | None:
    """`max_tokens` is the older name."""
    max_tokens = fields.integer("max_completion_tokens")
    return fields.integer("max_tokens") if max_tokens is None else max_tokens


def _logprobs(fields: Fields) -> int | None:
    num_top = fields.integer("top_logprobs")
    if not fields.boolean("logprobs"):
        if num_top:
            raise InvalidRequest("top_logprobs needs logprobs; set logprobs to true", "top_logprobs")
        return None
    return num_top or 0


def _messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages is required and must be a list of at least one message", "messages")
    return tuple(_message(f"messages[{place}]", message) for place, message in enumerate(value))


def _message(name: str, message: Any) -> Mapping[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{name} must be an object with role and content", "messages")
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise InvalidRequest(f"{name}.role is required and must be a string, such as 'user'", "messages")
    for field in ("tool_calls", "function_call", "audio"):
        if message.get(field):
            raise InvalidRequest(f"{name}.{field} is not supported; leave it out", "messages")
    return message | {"content": _content(f"{name}.content", message.get("content"))}


def _content(name: str, content: Any) -> str:
    """A string, or the texts of a list of parts, one below the other."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{name} must be a string or a list of text parts", "messages")
    texts: list[str] = []
    for place, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"{name}[{place}] must be {{'type': 'text', 'text': ...}}; only text is served", "messages"
            )
        texts.append(part["text"])
    return "\n".join(texts)


class ChatForm:
    """The words of one chat reply."""

    def __init__(self, tokenizer: Tokenizer, ask: Ask) -> None:
        self._tokenizer = tokenizer
        self._has_logprobs = ask.sampling.logprobs is not None

    def opening(self) -> str:
        return '"delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null'

    def delta(self, text: str, tokens: tuple[Token, ...]) -> str | None:
        logprobs = "null"
        if self._has_logprobs and tokens:
            logprobs = json.dumps(chat_logprobs(self._tokenizer, tokens))
        elif not text:
            return None
        return f'"delta": {{"content": {json.dumps(text)}}}, "logprobs": {logprobs}, "finish_reason": null'

    def closing(self, finish_reason: str) -> str:
        return f'"delta": {{}}, "logprobs": null, "finish_reason": "{finish_reason}"'

    def whole(self, text: str, tokens: tuple[Token, ...], finish_reason: str) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": chat_logprobs(self._tokenizer, tokens) if self._has_logprobs else None,
            "finish_reason": finish_reason,
        }


CHAT = GenerationRoute("chatcmpl", "chat.completion", "chat.completion.chunk", parse, ChatForm)
