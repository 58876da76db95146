"""POST /v1/completions"""

from __future__ import annotations

import json
from typing import Any

from pdserve_wire.messages import Token
from router.intake import Ask, InvalidRequest
from router.openai.logprobs import CompletionLogprobs
from router.openai.request import Fields, read_sampling
from router.openai.serve import GenerationRoute
from router.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


def parse(fields: Fields) -> Ask:
    return Ask(
        model=fields.string("model"),
        prompt=_prompt(fields.get("prompt")),
        sampling=read_sampling(fields, fields.integer("logprobs")),
        max_tokens=fields.integer("max_tokens"),
        default_max_tokens=DEFAULT_MAX_TOKENS,
        seed=fields.integer("seed"),
        stops=fields.stops(),
    )


def _prompt(value: Any) -> str | tuple[int, ...]:
    """A string or a list of token ids, or a list of one of these."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise InvalidRequest(f"prompt holds {len(value)} prompts; send one a request", "prompt")
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token_id) is int for token_id in value):
        return tuple(value)
    raise InvalidRequest("prompt is required and must be a string, a list of token ids, or a list of one", "prompt")


class CompletionForm:
    """The words of one completion."""

    def __init__(self, tokenizer: Tokenizer, ask: Ask) -> None:
        self._logprobs = CompletionLogprobs(tokenizer) if ask.sampling.logprobs is not None else None
        self._is_first = True

    def opening(self) -> None:
        return None

    def delta(self, text: str, tokens: tuple[Token, ...]) -> str | None:
        """The first is told without text, too, so that the client knows that the reply has begun."""
        logprobs = "null"
        if self._logprobs is not None and tokens:
            logprobs = json.dumps(self._logprobs.part(tokens))
        elif not text and not self._is_first:
            return None
        self._is_first = False
        return f'"text": {json.dumps(text)}, "logprobs": {logprobs}, "finish_reason": null'

    def closing(self, finish_reason: str) -> str:
        return f'"text": "", "logprobs": null, "finish_reason": "{finish_reason}"'

    def whole(self, text: str, tokens: tuple[Token, ...], finish_reason: str) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._logprobs.part(tokens)
        return {"text": text, "logprobs": logprobs, "finish_reason": finish_reason}


COMPLETIONS = GenerationRoute("cmpl", "text_completion", "text_completion", parse, CompletionForm)
