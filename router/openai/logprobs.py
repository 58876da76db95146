"""Log probabilities in OpenAI's two forms."""

from __future__ import annotations

from typing import Any

from pdserve_wire.messages import Token
from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer

_LEAST = -9999.0  # for what JSON has no number for: -inf, and NaN


def chat_logprobs(tokenizer: Tokenizer, tokens: tuple[Token, ...]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat. Each token has its exact bytes, for it may be a part of a character."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        text = tokenizer.token_text(token_id)
        shown = tokenizer.bytes_of(token_id) or text.encode()
        return {"token": text, "logprob": _finite(logprob), "bytes": list(shown)}

    content = [
        entry(token.token_id, token.logprob)
        | {"top_logprobs": [entry(top.token_id, top.logprob) for top in token.top_logprobs]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of a completion, a part at a time: `text_offset` counts on."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._offset = 0

    def part(self, tokens: tuple[Token, ...]) -> dict[str, Any]:
        """The chosen token is in its own `top_logprobs`, whether or not it is among the likeliest."""
        texts: list[str] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        for token in tokens:
            text = self._text(token.token_id)
            texts.append(text)
            top = {self._text(top.token_id): _finite(top.logprob) for top in token.top_logprobs}
            tops.append(top | {text: _finite(token.logprob)})
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(token.token_id))
        logprobs = [_finite(token.logprob) for token in tokens]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _text(self, token_id: int) -> str:
        """A token that is a part of a character is written as its bytes, as OpenAI does."""
        try:
            return self._tokenizer.bytes_of(token_id).decode() or self._tokenizer.token_text(token_id)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._tokenizer.bytes_of(token_id))


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and logprob > _LEAST else _LEAST
