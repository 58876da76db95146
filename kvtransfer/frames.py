"""The frames of a pull, and their bytes.

    OPEN ->                                     from decode
    <- ACCEPT | REFUSE(field, reason)           from prefill
    <- BLOCK(index, bytes) x n, in order, as they finish; WORKING between
    <- DONE | FAIL(reason)
    ACK ->

Each frame is a header of 24 bytes and a body:

    magic 4 | type 1 | zero 3 | length 4 | index 4 | checksum 8      network order

`length` is the body's, and bounded before any memory is taken for it: a block's must be the size
that both sides agreed on, all others are small. `checksum` is the body's xxh3_64. Control bodies are
JSON, DONE's is four numbers and the payload. Whatever is malformed raises `ProtocolError`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from xxhash import xxh3_64_intdigest

from kvtransfer.errors import ChecksumError, ProtocolError
from kvtransfer.messages import MAX_PAYLOAD_NBYTES, Done, OpenRequest

PROTOCOL_VERSION = 1
MAX_CONTROL_NBYTES = 1 << 20
MAX_REASON_LENGTH = 500  # characters; a longer one is cut

_MAGIC = b"PDK1"
_HEADER = struct.Struct("!4sB3sIIQ")
_DONE = struct.Struct("!QddI")
HEADER_NBYTES = _HEADER.size


class FrameType(IntEnum):
    OPEN = 1
    ACCEPT = 2
    REFUSE = 3
    BLOCK = 4
    WORKING = 5
    DONE = 6
    FAIL = 7
    ACK = 8


_MAX_NBYTES = {
    FrameType.OPEN: MAX_CONTROL_NBYTES,
    FrameType.ACCEPT: 1 << 10,
    FrameType.REFUSE: 1 << 14,
    FrameType.WORKING: 1 << 10,
    FrameType.DONE: _DONE.size + MAX_PAYLOAD_NBYTES,
    FrameType.FAIL: 1 << 14,
    FrameType.ACK: 0,
}


@dataclass(frozen=True, slots=True)
class Header:
    type: FrameType
    length: int
    index: int
    checksum: int


@dataclass(frozen=True, slots=True)
class OpenFrame:
    """The request, and the form of the destination that it is to fill."""

    request: OpenRequest
    num_blocks: int
    block_nbytes: int


@dataclass(frozen=True, slots=True)
class AcceptFrame:
    protocol: int


@dataclass(frozen=True, slots=True)
class RefuseFrame:
    field: str
    reason: str


@dataclass(frozen=True, slots=True)
class BlockFrame:
    index: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class WorkingFrame:
    num_computed_tokens: int
    step: int


@dataclass(frozen=True, slots=True)
class DoneFrame:
    done: Done
    num_blocks_before_prefill_end: int


@dataclass(frozen=True, slots=True)
class FailFrame:
    reason: str


@dataclass(frozen=True, slots=True)
class AckFrame:
    pass


ControlFrame = OpenFrame | AcceptFrame | RefuseFrame | WorkingFrame | DoneFrame | FailFrame | AckFrame
Frame = ControlFrame | BlockFrame


def frame_type(frame: Frame) -> FrameType:
    match frame:
        case OpenFrame():
            return FrameType.OPEN
        case AcceptFrame():
            return FrameType.ACCEPT
        case RefuseFrame():
            return FrameType.REFUSE
        case BlockFrame():
            return FrameType.BLOCK
        case WorkingFrame():
            return FrameType.WORKING
        case DoneFrame():
            return FrameType.DONE
        case FailFrame():
            return FrameType.FAIL
        case AckFrame():
            return FrameType.ACK


def encode(frame: Frame) -> tuple[bytes | memoryview, bytes | memoryview]:
    """Header and body; a block's body is its own memory. Raises `ProtocolError` when it is too large."""
    kind = frame_type(frame)
    if isinstance(frame, BlockFrame):
        checksum = xxh3_64_intdigest(frame.data)
        return _HEADER.pack(_MAGIC, kind, b"", frame.data.nbytes, frame.index, checksum), frame.data
    body = _encode_body(frame)
    if len(body) > _MAX_NBYTES[kind]:
        raise ProtocolError(f"{kind.name} of {len(body)} bytes is more than {_MAX_NBYTES[kind]}")
    return _HEADER.pack(_MAGIC, kind, b"", len(body), 0, xxh3_64_intdigest(body)), body


def decode_header(data: bytes | bytearray, block_nbytes: int | None = None) -> Header:
    """`block_nbytes` is the one size that a BLOCK may have here; None: no BLOCK may come."""
    magic, kind, zero, length, index, checksum = _HEADER.unpack(data)
    if magic != _MAGIC or any(zero):
        raise ProtocolError("not a frame of this protocol")
    try:
        header = Header(FrameType(kind), length, index, checksum)
    except ValueError:
        raise ProtocolError(f"frame type {kind} is unknown") from None
    if header.type is FrameType.BLOCK:
        if length != block_nbytes:
            raise ProtocolError(f"BLOCK of {length} bytes where {block_nbytes} are expected")
    elif length > _MAX_NBYTES[header.type] or index != 0:
        raise ProtocolError(f"{header.type.name} with length {length} and index {index}")
    return header


def verify(header: Header, body: bytes | bytearray | memoryview) -> None:
    """Raises `ChecksumError` when the bytes are not those that were sent."""
    if xxh3_64_intdigest(body) != header.checksum:
        raise ChecksumError(f"{header.type.name} {header.index}: checksum mismatch")


def decode_body(header: Header, body: bytes | bytearray) -> ControlFrame:
    """Verifies it too."""
    verify(header, body)
    if header.type is FrameType.DONE:
        return _decode_done(body)
    if header.type is FrameType.ACK:
        return AckFrame()
    try:
        fields = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{header.type.name}: {type(error).__name__} in its JSON") from None
    if not isinstance(fields, dict):
        raise ProtocolError(f"{header.type.name}: its JSON is no object")
    match header.type:
        case FrameType.OPEN:
            return _decode_open(fields)
        case FrameType.ACCEPT:
            return AcceptFrame(_count(fields, "protocol"))
        case FrameType.REFUSE:
            return RefuseFrame(_text(fields.get("field"), "field"), _text(fields.get("reason"), "reason"))
        case FrameType.WORKING:
            return WorkingFrame(_count(fields, "num_computed_tokens"), _count(fields, "step"))
        case FrameType.FAIL:
            return FailFrame(_text(fields.get("reason"), "reason"))
        case _:
            raise ProtocolError(f"{header.type.name} has no control body")


def _encode_body(frame: ControlFrame) -> bytes:
    match frame:
        case OpenFrame(request, num_blocks, block_nbytes):
            fields: dict[str, Any] = {
                "handoff_id": request.handoff_id,
                "pull_attempt": request.pull_attempt,
                "protocol_min": request.protocol_min,
                "protocol_max": request.protocol_max,
                "epoch": request.epoch,
                "layout": dict(request.layout),
                "have": request.have,
                "num_blocks": num_blocks,
                "block_nbytes": block_nbytes,
            }
        case AcceptFrame(protocol):
            fields = {"protocol": protocol}
        case RefuseFrame(field, reason):
            fields = {"field": field[:MAX_REASON_LENGTH], "reason": reason[:MAX_REASON_LENGTH]}
        case WorkingFrame(num_computed_tokens, step):
            fields = {"num_computed_tokens": num_computed_tokens, "step": step}
        case FailFrame(reason):
            fields = {"reason": reason[:MAX_REASON_LENGTH]}
        case DoneFrame(done, num_blocks_before):
            return _DONE.pack(done.num_tokens, done.exposed_s, done.open_wait_s, num_blocks_before) + done.payload
        case AckFrame():
            return b""
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()


def _decode_open(fields: Mapping[str, Any]) -> OpenFrame:
    layout, have = fields.get("layout"), fields.get("have")
    if not isinstance(layout, dict) or not isinstance(have, list):
        raise ProtocolError("OPEN: layout must be an object and have a list")
    request = OpenRequest(
        handoff_id=_text(fields.get("handoff_id"), "handoff_id"),
        pull_attempt=_count(fields, "pull_attempt"),
        protocol_min=_count(fields, "protocol_min"),
        protocol_max=_count(fields, "protocol_max"),
        epoch=_count(fields, "epoch"),
        layout={_text(key, "layout"): _text_or_int(value) for key, value in layout.items()},
        have=tuple(_text(value, "have") for value in have),
    )
    return OpenFrame(request, _count(fields, "num_blocks"), _count(fields, "block_nbytes"))


def _decode_done(body: bytes | bytearray) -> DoneFrame:
    if len(body) < _DONE.size:
        raise ProtocolError("DONE is too short")
    num_tokens, exposed_s, open_wait_s, num_blocks_before = _DONE.unpack_from(body)
    if not (0 <= exposed_s < 1e9 and 0 <= open_wait_s < 1e9):  # also false for NaN
        raise ProtocolError("DONE: a duration is out of range")
    return DoneFrame(Done(num_tokens, bytes(body[_DONE.size :]), exposed_s, open_wait_s), num_blocks_before)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or any("\ud800" <= char <= "\udfff" for char in value):
        raise ProtocolError(f"{name} must be text")
    return value


def _text_or_int(value: object) -> str | int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return _text(value, "layout")


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise ProtocolError(f"{name} must be a count")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(name)
