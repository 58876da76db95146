from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from router.text.stop import StopStrings

LETTERS = "ab "
STOPS = st.lists(st.text("ab ", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The rule, word by word: the first stop string to end, and of two that end together the longer."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def run(parts: list[str], stops: list[str]) -> tuple[list[str], bool]:
    stream = StopStrings(stops)
    out = []
    for part in parts:
        text, is_stopped = stream.push(part)
        out.append(text)
        if is_stopped:
            return out, True
    return [*out, stream.flush()], False


@given(text=st.text(LETTERS, max_size=30), stops=STOPS, data=st.data())
@example(text="abab b", stops=["abab b", "b"], data=None)
def test_any_split_gives_the_cut_of_the_whole(text: str, stops: list[str], data: st.DataObject | None) -> None:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8)) if data else [2, 4]
    bounds = [0, *sorted(places), len(text)]
    parts = [text[start:end] for start, end in pairwise(bounds)]
    out, is_stopped = run(parts, stops)
    assert ("".join(out), is_stopped) == cut(text, stops)


@given(text=st.text(LETTERS, max_size=30), stops=STOPS)
def test_nothing_is_held_back_but_what_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    stream = StopStrings(stops)
    let_out = ""
    for place, char in enumerate(text):
        added, is_stopped = stream.push(char)
        let_out += added
        if is_stopped:
            return
        held = text[len(let_out) : place + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_over_three_pushes_leaves_no_trace() -> None:
    assert run(["Hello <", "en", "d> more"], ["<end>"]) == (["Hello ", "", ""], True)


def test_a_beginning_that_comes_to_nothing_is_let_out() -> None:
    assert run(["x <", "en", "ough>"], ["<end>"]) == (["x ", "", "<enough>", ""], False)


def test_a_beginning_at_the_end_of_the_reply_is_flushed() -> None:
    assert run(["x <en"], ["<end>"]) == (["x ", "<en"], False)


def test_without_stop_strings_everything_passes() -> None:
    assert run(["a", "b"], []) == (["a", "b", ""], False)


def test_a_thousand_likely_beginnings_cost_little() -> None:
    stream = StopStrings(["ab" * 500 + "c"] * 16)
    out = "".join(stream.push("a" * 50)[0] for _ in range(400)) + stream.flush()
    assert out == "a" * 20_000
