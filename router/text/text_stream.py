"""One choice's tokens as the text that its reader may see: detokenizer and stop strings together."""

from __future__ import annotations

from collections.abc import Sequence

from router.text.detokenizer import Detokenizer
from router.text.stop import StopStrings
from router.text.tokenizer import Tokenizer


class TextStream:
    """Push tokens in order until a finish reason comes back; then drop it.

    The token that ends a reply by itself (EOS, or one of the request's `stop_token_ids`) is no part
    of its text. Stop strings are not looked for in the text of the first `min_tokens` tokens.

    `num_decoded_chars` counts all text so far, `num_emitted_chars` what `push` has returned: their
    difference is held back, or was cut away by a stop string.
    """

    __slots__ = ("_detokenizer", "_min_tokens", "_num_tokens", "_stops", "num_decoded_chars", "num_emitted_chars")

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens if stops else 0
        self._num_tokens = 0
        self.num_decoded_chars = 0
        self.num_emitted_chars = 0

    def push(self, token_id: int, finish_reason: str | None = None) -> tuple[str, str | None]:
        """The text that is certain now, and why the reply ends here, if it does.

        `finish_reason` is the worker's word on this token. A stop string makes it "stop": then the
        caller ends the generation.
        """
        text = "" if finish_reason == "stop" else self._detokenizer.push(token_id)
        if finish_reason is not None:
            text += self._detokenizer.flush()
        self.num_decoded_chars += len(text)
        self._num_tokens += 1
        if self._num_tokens > self._min_tokens:
            text, is_stopped = self._stops.push(text)
            if is_stopped:
                finish_reason = "stop"
            elif finish_reason is not None:
                text += self._stops.flush()
        self.num_emitted_chars += len(text)
        return text, finish_reason
