from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer

SAMPLES = (
    "Hello, world! The answer is 42.\n\n  indented\ttabbed  ",
    "Grüße aus Köln, à bientôt, señor; naïve café",
    "日本語のテキスト、漢字とかな。中文字符，测试。한국어 문장입니다.",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया",
    "👋🏽 emoji 👩‍👩‍👧‍👦 flags 🇩🇪🇯🇵 and 𝒻𝒶𝓃𝒸𝓎 𐍈",
    "mixed日本🎉text\u2028line\u0000nul \ufffd replacement",
)


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def fragments(tokenizer: Tokenizer) -> list[int]:
    """Tokens that hold bytes beyond ASCII: parts of characters above all."""
    return [token_id for token_id, data in enumerate(tokenizer.token_bytes) if not data.isascii()]


def pushes_of(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("text", SAMPLES)
def test_real_text_of_many_languages_comes_back_whole(tokenizer: Tokenizer, text: str) -> None:
    pushes = pushes_of(tokenizer, tokenizer.encode(text))
    assert "".join(pushes) == text
    assert pushes[-1] == ""


@pytest.mark.parametrize("text", SAMPLES)
def test_no_push_ever_holds_a_part_of_a_character(tokenizer: Tokenizer, text: str) -> None:
    if "\ufffd" in text:
        text = text.replace("\ufffd", "")
    assert not any("\ufffd" in push for push in pushes_of(tokenizer, tokenizer.encode(text)))


def test_emoji_that_spans_tokens_comes_with_its_last_token(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("🦖")
    assert len(token_ids) > 1, "the case needs an emoji of several tokens"
    assert pushes_of(tokenizer, token_ids) == [""] * (len(token_ids) - 1) + ["🦖", ""]


def test_a_leading_space_stays(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(" world")
    assert "".join(pushes_of(tokenizer, token_ids)) == " world"


def test_an_unfinished_character_at_the_end_is_one_replacement(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("🦖")[:-1]
    assert pushes_of(tokenizer, token_ids)[-1] == "\ufffd"


def test_ids_that_stand_for_nothing_are_skipped(tokenizer: Tokenizer) -> None:
    hello = tokenizer.encode("hello")
    special = sorted(tokenizer.special_token_ids)[:2]
    assert "".join(pushes_of(tokenizer, [*special, *hello, *special, tokenizer.vocab_size + 7])) == "hello"


def test_a_special_token_inside_a_character_does_not_break_it(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer
) -> None:
    first, *rest = tokenizer.encode("🦖")
    token_ids = [first, min(tokenizer.special_token_ids), *rest]
    assert "".join(pushes_of(tokenizer, token_ids)) == reference.decode(token_ids) == "🦖"


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_any_ids_decode_as_the_tokenizers_library_decodes_them(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, fragments: list[int], data: st.DataObject
) -> None:
    any_id = st.integers(0, tokenizer.vocab_size - 1) | st.sampled_from(fragments)
    token_ids = data.draw(st.lists(any_id, max_size=40))
    assert "".join(pushes_of(tokenizer, token_ids)) == reference.decode(token_ids) == tokenizer.decode(token_ids)


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=40))
def test_any_text_decodes_as_the_library_decodes_it(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, text: str
) -> None:
    # not always the text itself: this vocabulary lacks a few bytes (0xF1 is one)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pushes_of(tokenizer, token_ids)) == reference.decode(token_ids)


def test_many_bytes_that_are_no_text_cost_no_more_than_text(tokenizer: Tokenizer, fragments: list[int]) -> None:
    stray = next(token_id for token_id in fragments if tokenizer.token_bytes[token_id][0] in range(0x80, 0xC0))
    pushes = pushes_of(tokenizer, [stray] * 20_000)
    assert max(map(len, pushes)) <= len(tokenizer.token_bytes[stray])
