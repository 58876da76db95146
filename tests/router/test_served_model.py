from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from router.served_model import ServedModel
from router.text.errors import ModelFilesError


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_folder / name, tmp_path)
    return tmp_path


def write_config(folder: Path, **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def test_the_bundled_model_is_loaded_without_its_weights(model_folder: Path) -> None:
    model = ServedModel.load(model_folder, "smol")
    assert (model.name, model.max_model_len, model.vocab_size) == ("smol", 8192, 49152)
    assert model.chat_template is not None


def test_the_length_may_be_lowered_but_not_raised(model_folder: Path) -> None:
    assert ServedModel.load(model_folder, "smol", 100).max_model_len == 100
    with pytest.raises(ModelFilesError, match="8192"):
        ServedModel.load(model_folder, "smol", 8193)
    with pytest.raises(ModelFilesError, match="at least 2"):
        ServedModel.load(model_folder, "smol", 1)


def test_a_model_of_several_parts_has_its_text_part_read(folder: Path) -> None:
    write_config(folder, vocab_size=1, text_config={"vocab_size": 50000, "max_position_embeddings": 64})
    model = ServedModel.load(folder, "multi")
    assert (model.max_model_len, model.vocab_size) == (64, 50000)


def test_the_older_name_of_the_length_is_known(folder: Path) -> None:
    write_config(folder, vocab_size=50257, n_positions=1024)
    assert ServedModel.load(folder, "gpt2").max_model_len == 1024


def test_without_a_length_one_must_be_given(folder: Path) -> None:
    write_config(folder, vocab_size=50257)
    with pytest.raises(ModelFilesError, match="set max_model_len"):
        ServedModel.load(folder, "x")
    assert ServedModel.load(folder, "x", 32).max_model_len == 32


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_missing_or_damaged_configuration_is_named(folder: Path, text: str | None) -> None:
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        ServedModel.load(folder, "x")
