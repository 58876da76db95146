"""The model that a router serves, as far as text goes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from router.text.chat_template import ChatTemplate
from router.text.errors import ModelFilesError
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A name for clients, the text side of the model, and its two limits.

    `max_model_len` is the most tokens that prompt and reply can have together; `vocab_size` is the
    number of embedding rows: a token id must be below it.
    """

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_model_len: int
    vocab_size: int

    @classmethod
    def load(cls, folder: Path, name: str, max_model_len: int | None = None) -> ServedModel:
        """Read a model folder (`config.json`, `tokenizer.json`, ...); never its weights.

        `max_model_len` may lower the model's own limit. Raises `ModelFilesError`.
        """
        config = _text_config(folder / "config.json")
        limit = config.get("max_position_embeddings", config.get("n_positions"))
        if limit is None and max_model_len is None:
            raise ModelFilesError(f"{folder}/config.json names no max_position_embeddings; set max_model_len")
        if limit is not None and max_model_len is not None and max_model_len > limit:
            raise ModelFilesError(f"max_model_len {max_model_len} is above the model's {limit}; lower it")
        if max_model_len is not None and max_model_len < 2:
            raise ModelFilesError(f"max_model_len must be at least 2 (a prompt and a reply), not {max_model_len}")
        tokenizer = Tokenizer.load(folder)
        return cls(
            name=name,
            tokenizer=tokenizer,
            chat_template=ChatTemplate.load(folder),
            max_model_len=max_model_len or limit or 0,
            vocab_size=config.get("vocab_size", tokenizer.vocab_size),
        )


def _text_config(path: Path) -> dict[str, int]:
    """The whole numbers of `config.json`, or of its `text_config` where the model has several parts."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelFilesError(f"{path} must hold a JSON object")
    config = config.get("text_config", config)
    return {key: value for key, value in config.items() if isinstance(value, int)}
