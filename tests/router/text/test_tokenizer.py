from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from router.text.detokenizer import Detokenizer
from router.text.errors import EncodeError, ModelFilesError
from router.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


def make_sentencepiece(has_byte_fallback: bool = True) -> Tokenizer:
    """A vocabulary in the manner of Llama 2: words with a space mark, and a token for each byte."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "日", "ing"]
    vocabulary = {word: token_id for token_id, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    if not has_byte_fallback:
        del steps[1]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>"])
    return Tokenizer(backend)


def test_encoding_is_that_of_the_library(tokenizer: Tokenizer, model_folder: Path) -> None:
    reference = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    for text in ("", " ", "Hello, world", "<|im_start|>user\nhi<|im_end|>", "日本語 🦖"):
        assert tokenizer.encode(text) == reference.encode(text).ids


def test_special_tokens_are_known_and_have_no_text(tokenizer: Tokenizer) -> None:
    (eos,) = tokenizer.encode("<|im_end|>")
    assert eos in tokenizer.special_token_ids
    assert tokenizer.bytes_of(eos) == b""
    assert tokenizer.token_text(eos) == "<|im_end|>"
    assert tokenizer.decode([eos, *tokenizer.encode("hi"), eos]) == "hi"


def test_the_vocabulary_reaches_to_the_highest_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.bytes_of(tokenizer.vocab_size) == b""


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(EncodeError, match="surrogate"):
        tokenizer.encode("half \ud83d a pair")


def test_a_sentencepiece_vocabulary_streams_spaces_and_bytes() -> None:
    tokenizer = make_sentencepiece()
    names = ["▁Hello", "▁world", "ing", "<0xF0>", "<0x9F>", "<0xA6>", "<0x96>", "日"]
    detokenizer = Detokenizer(tokenizer)
    token_ids = [tokenizer._backend.token_to_id(name) for name in names]
    assert [detokenizer.push(token_id) for token_id in token_ids] == [" Hello", " world", "ing", "", "", "", "🦖", "日"]


def test_a_sentencepiece_reply_is_what_follows_its_prompt() -> None:
    tokenizer = make_sentencepiece()
    prompt, reply = [tokenizer._backend.token_to_id(name) for name in ("▁Hello", "▁world")]
    backend = tokenizer._backend
    assert tokenizer.decode([reply]) == backend.decode([prompt, reply]).removeprefix(backend.decode([prompt]))


def test_without_byte_fallback_a_byte_token_is_its_own_name() -> None:
    tokenizer = make_sentencepiece(has_byte_fallback=False)
    assert tokenizer.decode([tokenizer._backend.token_to_id("<0xF0>")]) == "<0xF0>"


def test_truncation_and_padding_left_in_the_file_do_nothing(model_folder: Path, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("one two three four five six")) == 6


def test_a_decoder_that_is_not_bytes_in_a_row_is_refused_by_name(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelFilesError, match="WordPiece"):
        Tokenizer.load(tmp_path)


def test_a_missing_or_damaged_file_is_named(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes()[:1000])
    with pytest.raises(ModelFilesError, match="can't be read"):
        Tokenizer.load(tmp_path)
