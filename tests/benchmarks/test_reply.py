"""What a stream of chunks says: tokens, their times, and whether the answer is whole."""

from __future__ import annotations

import pytest

from benchmarks.reply import Reply, read_reply
from tests.benchmarks.makers import DONE, chat_chunk, chunk, make_reply, usage_chunk


def read(*steps: bytes) -> Reply:
    """The reply whose chunks arrive at 1, 2, 3, ... seconds."""
    return read_reply(list(enumerate(steps, start=1)), sent_at=0.0, ended_at=float(len(steps)))


def test_each_chunk_is_a_token_where_the_server_tells_no_usage() -> None:
    reply = read(chunk("a"), chunk("b"), chunk("c", "length"), DONE)
    assert (reply.error, reply.num_tokens, reply.token_times) == ("", 3, (1, 2, 3))


def test_the_final_usage_says_how_many_tokens_there_were() -> None:
    reply = read(chunk("a"), chunk("b and c", "length"), usage_chunk(3, num_prompt_tokens=12), DONE)
    assert (reply.num_tokens, reply.num_chunks, reply.num_prompt_tokens) == (3, 2, 12)
    assert reply.tpot_s == 0.5  # one second for the two after the first


def test_tokens_of_one_chunk_come_at_one_time_where_the_chunk_says_how_many() -> None:
    def counted(text: str, num_so_far: int) -> bytes:
        return chunk(text, usage={"prompt_tokens": 5, "completion_tokens": num_so_far})

    reply = read(counted("a", 1), counted("bcd", 4), counted("e", 5), usage_chunk(5), DONE)
    assert reply.token_times == (1, 2, 2, 2, 3)
    assert reply.itl_s == [1, 0, 0, 1]
    assert reply.num_chunks == 3


def test_a_sum_in_the_last_chunk_is_not_taken_for_its_own_tokens() -> None:  # llama.cpp's form
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    reply = read(chunk("a"), chunk("b"), chunk("c"), chunk("", "length", usage=usage), DONE)
    assert reply.token_times == (1, 2, 3)
    assert reply.num_tokens == 3


def test_a_token_without_text_counts_and_a_bare_end_does_not() -> None:
    reply = read(chunk(""), chunk("é"), chunk("", "length"), DONE)
    assert reply.token_times == (1, 2)


def test_the_role_that_opens_a_chat_is_no_token() -> None:
    opening = chat_chunk({"role": "assistant", "content": ""})
    reply = read(opening, chat_chunk({"content": "a"}), chat_chunk({"content": "b"}), chat_chunk({}, "stop"), DONE)
    assert reply.token_times == (2, 3)


def test_a_thought_is_a_token_too() -> None:
    reply = read(chat_chunk({"reasoning_content": "hm"}), chat_chunk({"content": "a"}, "stop"))
    assert reply.token_times == (1, 2)


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ((chunk("a"),), "the stream broke off"),
        ((chunk("", "stop"), DONE), "no token came"),
        ((DONE,), "no token came"),
        ((chunk("a"), b'data: {"error": {"message": "the worker is gone"}}\n\n'), "the worker is gone"),
        ((chunk("a"), b'data: {"error": "gone"}\n\n', DONE), "gone"),
        ((b"data: <html>\n\n", DONE), "a chunk that is not JSON: b'<html>'"),
    ],
)
def test_what_is_wrong_with_a_stream_is_told(steps: tuple[bytes, ...], error: str) -> None:
    assert read(*steps).error == error


def test_a_finish_reason_ends_a_stream_without_done() -> None:
    assert read(chunk("a", "stop")).error == ""


def test_the_durations_of_a_reply() -> None:
    reply = make_reply(0.5, 0.6, 0.9)
    assert reply.ttft_s == 0.5
    assert reply.tpot_s == pytest.approx(0.2)
    assert reply.itl_s == pytest.approx([0.1, 0.3])


def test_one_token_has_no_time_per_further_token() -> None:
    assert make_reply(0.5).tpot_s is None
