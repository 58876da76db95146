from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.text_stream import TextStream
from router.text.tokenizer import Tokenizer

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


def run(
    tokenizer: Tokenizer, token_ids: list[int], stops: list[str], reason: str = "length", min_tokens: int = 0
) -> tuple[list[str], str | None]:
    stream = TextStream(tokenizer, stops, min_tokens)
    out: list[str] = []
    for place, token_id in enumerate(token_ids):
        text, finish_reason = stream.push(token_id, reason if place == len(token_ids) - 1 else None)
        out.append(text)
        if finish_reason is not None:
            return out, finish_reason
    return out, None


def test_without_a_stop_the_workers_reason_stands(tokenizer: Tokenizer) -> None:
    out, reason = run(tokenizer, tokenizer.encode("one two three"), [])
    assert ("".join(out), reason) == ("one two three", "length")


def test_a_stop_string_ends_the_reply_and_leaves_no_trace(tokenizer: Tokenizer) -> None:
    out, reason = run(tokenizer, tokenizer.encode("Q: why?\nA: so.\nQ: what?"), ["\nQ:"])
    assert ("".join(out), reason) == ("Q: why?\nA: so.", "stop")


def test_held_back_text_comes_with_the_last_token(tokenizer: Tokenizer) -> None:
    out, reason = run(tokenizer, tokenizer.encode("a list: one, two"), [" two, three"])
    assert ("".join(out), reason) == ("a list: one, two", "length")


def test_a_stop_string_in_the_last_token_wins_over_length(tokenizer: Tokenizer) -> None:
    out, reason = run(tokenizer, tokenizer.encode("go on. Stop"), ["Stop"])
    assert ("".join(out), reason) == ("go on. ", "stop")


def test_the_token_that_ends_a_reply_is_no_text(tokenizer: Tokenizer) -> None:
    period = tokenizer.encode(".")
    assert run(tokenizer, [*tokenizer.encode("the end"), EOS], [], "stop") == (["the", " end", ""], "stop")
    out, _ = run(tokenizer, [*tokenizer.encode("the end"), *period], [], "stop")  # one of stop_token_ids
    assert "".join(out) == "the end"


def test_an_unfinished_character_is_told_at_the_end(tokenizer: Tokenizer) -> None:
    out, _ = run(tokenizer, tokenizer.encode("ok 🦖")[:-1], [])
    assert "".join(out).startswith("ok") and out[-1].endswith("\ufffd")


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("x x x x x x")
    assert "".join(run(tokenizer, token_ids, ["x"], min_tokens=3)[0]) == "x x x "


def test_emoji_as_stop_string(tokenizer: Tokenizer) -> None:
    out, reason = run(tokenizer, tokenizer.encode("before🦖after"), ["🦖"])
    assert ("".join(out), reason) == ("before", "stop")


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_random_stop_lists_cut_the_stream_where_they_cut_the_whole(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice(["the cat", " sat", " on", "日本", "🦖", "\n", ", ", "aa", "a"]) for _ in range(20))
    stops = [text[(start := rng.randrange(len(text))) : start + rng.randint(1, 6)] for _ in range(rng.randint(1, 4))]
    out, reason = run(tokenizer, tokenizer.encode(text), stops)
    ends = [text.find(stop) + len(stop) for stop in stops]
    starts = [text.find(stop) for stop, end in zip(stops, ends, strict=True) if end == min(ends)]
    assert ("".join(out), reason) == (text[: min(starts)], "stop")
