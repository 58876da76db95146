"""Which two workers may exchange KV."""

from __future__ import annotations

from dataclasses import fields

from pdserve_wire.messages import Layout, WorkerHello

_NOT_COMPARED = frozenset({"weights"})  # prefill in bf16 may feed decode in int4


def first_mismatch(ours: Layout, theirs: Layout) -> str | None:
    """The name of the first field that keeps the two apart, or `None` where they fit."""
    for field in fields(Layout):
        if field.name not in _NOT_COMPARED and getattr(ours, field.name) != getattr(theirs, field.name):
            return field.name
    return None


def can_pair(prefill: WorkerHello, decode: WorkerHello) -> bool:
    """Whether the two serve the same model, in the same form, and share a protocol version."""
    overlaps = prefill.protocol_min <= decode.protocol_max and decode.protocol_min <= prefill.protocol_max
    return overlaps and prefill.model == decode.model and first_mismatch(prefill.layout, decode.layout) is None
