"""Text to token ids, by the model's own `tokenizer.json`."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

from router.text.errors import EncodeError, ModelFilesError
from router.text.token_bytes import make_token_bytes


class Tokenizer:
    """A model's vocabulary. Immutable once loaded, and safe to use from several threads.

    `token_bytes[token_id]` are the bytes of text that a token stands for, `b""` for a special token;
    an id past its end stands for nothing (embeddings are often padded to more rows than there are
    tokens).
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self.special_token_ids = frozenset(self._special)
        decoder = json.loads(backend.to_str())["decoder"]
        self.token_bytes = make_token_bytes(decoder, backend.get_vocab(), self.special_token_ids)
        self.longest_token_nbytes = max(map(len, self.token_bytes), default=1)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Raises `ModelFilesError` where `tokenizer.json` is missing, damaged or not supported.

        What `tokenizer_config.json` says about added tokens (`add_bos_token`) is already in the
        post-processor of `tokenizer.json`.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelFilesError(f"{folder} has no tokenizer.json; save the model's fast tokenizer there")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare exceptions
            raise ModelFilesError(f"{path} can't be read as a tokenizer: {error}") from error
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id, added tokens included."""
        return len(self.token_bytes)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with `add_special_tokens` also those that begin a document (BOS).

        Lets other threads run meanwhile: call it in one for long texts (about 1 us a character).
        Raises `EncodeError` for half of a surrogate pair.
        """
        try:  # the batch form is the one that gives up the GIL
            encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (TypeError, UnicodeEncodeError) as error:
            raise EncodeError("the text holds half of a surrogate pair; send well-formed Unicode") from error
        return list(encoding.ids)

    def decode(self, token_ids: list[int] | tuple[int, ...]) -> str:
        """The text of a whole run of tokens, special ones skipped."""
        return b"".join(map(self.bytes_of, token_ids)).decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> bytes:
        """The text bytes of one token; they may be a part of a character."""
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""

    def token_text(self, token_id: int) -> str:
        """How to show one token by itself: a special one by its name, a part of a character as U+FFFD."""
        return self._special.get(token_id) or self.bytes_of(token_id).decode("utf-8", "replace")
