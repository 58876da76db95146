"""The bytes of text that each token stands for.

A byte-level vocabulary (GPT-2, Llama 3, Qwen, ...) spells each byte as one printable character. A
SentencePiece vocabulary (Llama 2, Mistral, Gemma, ...) spells text as it is, with U+2581 for a
space and `<0xE2>` for a byte that has no token. Both come out as one table, so that decoding is a
lookup for each token, and the bytes of a token (`logprobs`, grammars) are exact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.text.errors import ModelFilesError

_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def make_token_bytes(
    decoder: Mapping[str, Any] | None, vocabulary: Mapping[str, int], special_ids: frozenset[int]
) -> tuple[bytes, ...]:
    """A table from token id to bytes; special tokens and unused ids have none.

    `decoder` is that part of `tokenizer.json`. Raises `ModelFilesError` for a decoder whose output
    is not the tokens' bytes in a row.
    """
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        bytes_of = _byte_level_bytes
    elif kinds and set(kinds) <= _SENTENCEPIECE_STEPS and all(map(_is_space_mark, steps)):
        bytes_of = _sentencepiece_bytes if "ByteFallback" in kinds else _plain_bytes
    else:
        raise ModelFilesError(
            f"tokenizer.json has a decoder of kind {kinds}; ByteLevel and SentencePiece "
            f"({', '.join(sorted(_SENTENCEPIECE_STEPS))}) are supported: convert the tokenizer to one of them"
        )
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        if token_id not in special_ids:
            table[token_id] = bytes_of(token)
    return tuple(table)


def _steps(decoder: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]


def _is_space_mark(step: Mapping[str, Any]) -> bool:
    """Whether a step that rewrites text rewrites just the mark to a space."""
    if step["type"] == "Replace":
        return bool(step.get("pattern") == {"String": _SPACE_MARK} and step.get("content") == " ")
    if step["type"] == "Metaspace":
        return step.get("replacement") == _SPACE_MARK
    return True


def _make_byte_of_char() -> dict[str, int]:
    """The printable stand-ins of GPT-2 (`bytes_to_unicode`), the other way round."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHAR = _make_byte_of_char()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # an added token, written as it is
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else _plain_bytes(token)


def _plain_bytes(token: str) -> bytes:
    return token.replace(_SPACE_MARK, " ").encode()
