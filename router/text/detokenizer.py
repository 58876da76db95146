"""Token ids to text as they come, never splitting a character."""

from __future__ import annotations

import codecs

from router.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns one run of tokens into text, at a table lookup for each token.

    A reply goes on from its prompt, so a leading space stays. All pushes and the flush, joined, are
    the UTF-8 text of all tokens' bytes; bytes that are no UTF-8 become U+FFFD, one for each maximal
    part of a character, as `tokenizers` decodes a byte-level vocabulary.
    """

    __slots__ = ("_decode", "_token_bytes")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        """The text that is certain now: all up to the first byte of an unfinished character."""
        table = self._token_bytes
        return self._decode(table[token_id]) if token_id < len(table) else ""

    def flush(self) -> str:
        """What an unfinished character is worth: U+FFFD, or nothing."""
        return self._decode(b"", True)
