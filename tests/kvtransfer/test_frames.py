"""The bytes of each frame, there and back, and what comes of bytes that are none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvtransfer.errors import ChecksumError, ProtocolError, TransferError
from kvtransfer.frames import (
    HEADER_NBYTES,
    MAX_CONTROL_NBYTES,
    MAX_REASON_LENGTH,
    AcceptFrame,
    AckFrame,
    BlockFrame,
    ControlFrame,
    DoneFrame,
    FailFrame,
    FrameType,
    Header,
    OpenFrame,
    RefuseFrame,
    WorkingFrame,
    decode_body,
    decode_header,
    encode,
    frame_type,
    verify,
)
from kvtransfer.messages import MAX_PAYLOAD_NBYTES, Done, OpenRequest
from tests.kvtransfer.makers import make_request

counts = st.integers(0, 2**64 - 1)
durations = st.floats(0, 1e8)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
requests = st.builds(
    OpenRequest,
    handoff_id=texts,
    pull_attempt=counts,
    protocol_min=counts,
    protocol_max=counts,
    epoch=counts,
    layout=st.dictionaries(texts, texts | st.integers(-(2**70), 2**70), max_size=5),
    have=st.lists(texts, max_size=5).map(tuple),
)
frames = st.one_of(
    st.builds(OpenFrame, requests, counts, counts),
    st.builds(AcceptFrame, counts),
    st.builds(RefuseFrame, texts, texts),
    st.builds(WorkingFrame, counts, counts),
    st.builds(
        DoneFrame, st.builds(Done, counts, st.binary(max_size=100), durations, durations), st.integers(0, 2**32 - 1)
    ),
    st.builds(FailFrame, texts),
    st.just(AckFrame()),
)


def decode(data: bytes) -> ControlFrame:
    return decode_body(decode_header(data[:HEADER_NBYTES]), data[HEADER_NBYTES:])


def body_of(kind: FrameType, body: bytes) -> ControlFrame:
    return decode_body(Header(kind, len(body), 0, xxh3_64_intdigest(body)), body)


@settings(max_examples=150, deadline=None)
@given(frames)
def test_each_frame_comes_back_equal(frame: ControlFrame) -> None:
    header, body = encode(frame)
    assert len(header) == HEADER_NBYTES
    assert decode(bytes(header) + bytes(body)) == frame


def test_a_block_is_its_own_memory_with_a_checksum_before_it() -> None:
    data = memoryview(b"the bytes of a block")
    header, body = encode(BlockFrame(3, data))
    assert body is data
    decoded = decode_header(bytes(header), block_nbytes=len(data))
    assert decoded == Header(FrameType.BLOCK, len(data), 3, xxh3_64_intdigest(data))
    verify(decoded, data)
    with pytest.raises(ChecksumError):
        verify(decoded, b"the bytes of a blocK")


@settings(max_examples=150, deadline=None)
@given(frames, st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_always_noticed(frame: ControlFrame, position: int, change: int) -> None:
    data = bytearray(b"".join(bytes(part) for part in encode(frame)))
    data[position % len(data)] ^= change
    try:
        header = decode_header(bytes(data[:HEADER_NBYTES]))
    except ProtocolError:
        return
    if (header.type, header.length) == (frame_type(frame), len(data) - HEADER_NBYTES):  # else the stream breaks
        with pytest.raises(TransferError):
            decode_body(header, bytes(data[HEADER_NBYTES:]))


@settings(deadline=None)
@given(st.binary(min_size=HEADER_NBYTES, max_size=HEADER_NBYTES))
def test_random_bytes_are_no_header(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_header(data, 4096)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FrameType), st.binary(max_size=80))
def test_a_random_body_is_a_frame_or_a_protocol_error(kind: FrameType, body: bytes) -> None:
    try:
        body_of(kind, body)
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "length", [(FrameType.OPEN, MAX_CONTROL_NBYTES + 1), (FrameType.DONE, (1 << 20) + 100), (FrameType.ACK, 1)]
)
def test_a_control_frame_that_claims_too_much_is_refused_by_its_header(length: tuple[FrameType, int]) -> None:
    header = bytearray(encode(AckFrame())[0])
    header[4], header[8:12] = length[0], length[1].to_bytes(4, "big")
    with pytest.raises(ProtocolError, match="length"):
        decode_header(bytes(header))


@pytest.mark.parametrize("block_nbytes", [None, 19, 21])
def test_a_block_of_another_size_than_agreed_is_refused_by_its_header(block_nbytes: int | None) -> None:
    header, _ = encode(BlockFrame(0, memoryview(bytes(20))))
    with pytest.raises(ProtocolError, match="BLOCK of 20 bytes"):
        decode_header(bytes(header), block_nbytes)


def test_a_request_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="more than"):
        encode(OpenFrame(make_request(have=("x" * 1000,) * 1100), 1, 1))


def test_the_largest_payload_fits() -> None:
    frame = DoneFrame(Done(1, bytes(MAX_PAYLOAD_NBYTES), 0.0, 0.0), 0)
    assert decode(b"".join(map(bytes, encode(frame)))) == frame


def test_a_long_reason_is_cut() -> None:
    reason = "why " * 10_000
    assert decode(b"".join(map(bytes, encode(FailFrame(reason))))) == FailFrame(reason[:MAX_REASON_LENGTH])


@pytest.mark.parametrize(
    "change",
    [
        {"handoff_id": 3},
        {"handoff_id": "\ud800"},
        {"handoff_id": None},
        {"pull_attempt": True},
        {"pull_attempt": -1},
        {"pull_attempt": 1.0},
        {"epoch": 1 << 64},
        {"layout": []},
        {"layout": {"a": 1.5}},
        {"layout": {"a": True}},
        {"layout": {"a": {}}},
        {"have": "abc"},
        {"have": [1]},
        {"num_blocks": None},
        {"block_nbytes": "4"},
    ],
)
def test_a_field_of_another_type_is_a_protocol_error(change: dict[str, object]) -> None:
    fields = json.loads(bytes(encode(OpenFrame(make_request(), 1, 2))[1]))
    assert isinstance(body_of(FrameType.OPEN, json.dumps(fields).encode()), OpenFrame)
    with pytest.raises(ProtocolError):
        body_of(FrameType.OPEN, json.dumps(fields | change).encode())


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"[" * 100_000, b"NaN", b'{"protocol": NaN}', b"9" * 9000, b"\xff"])
def test_json_that_is_no_frame_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        body_of(FrameType.ACCEPT, body)


@pytest.mark.parametrize("exposed_s", [-1.0, float("nan"), float("inf")])
def test_a_duration_that_is_none_is_a_protocol_error(exposed_s: float) -> None:
    frame = DoneFrame(Done(1, b"", 0.0, 0.0), 0)
    done = replace(frame, done=replace(frame.done, exposed_s=exposed_s))
    with pytest.raises(ProtocolError, match="duration"):
        decode(b"".join(map(bytes, encode(done))))
