"""What the two sides of a pull tell each other, as their owners see it, and the limits they are given.

The bytes that carry these are in `frames.py`. Layout and payload are opaque here: `kvtransfer` knows
bytes, not models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_PAYLOAD_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """Asks for the blocks of one hand-off. Of two attempts the source serves the higher, of
    equal ones the later.

    `have` holds the hashes of blocks that the asking side has cached: a source that knows them gives
    an `Outgoing` of only the missing ones, and the asking side brings a destination for only those.
    """

    handoff_id: str
    pull_attempt: int
    protocol_min: int
    protocol_max: int
    epoch: int
    layout: Mapping[str, str | int]
    have: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The sending side has said everything. Durations are measured on its clock.

    `payload` is what its owner gave to `Outgoing.finish` (at most 1 MiB). `exposed_s` is how long
    sending went on after the later of prefill's end and ACCEPT; `open_wait_s` how long finished
    blocks waited to be asked for.
    """

    num_tokens: int
    payload: bytes
    exposed_s: float
    open_wait_s: float


@dataclass(frozen=True, slots=True)
class PullResult:
    """Every block has arrived and is verified. `transfer_s` includes the making of a connection.

    `num_blocks_before_prefill_end` counts the blocks that went on their way before prefill was finished.
    """

    done: Done
    transport: str
    num_bytes: int
    num_blocks: int
    transfer_s: float
    num_blocks_before_prefill_end: int


@dataclass(frozen=True, slots=True)
class TransferDeadlines:
    """Every wait of this package ends by one of these. Seconds; its owner gives them."""

    connect_s: float = 1.0
    open_s: float = 2.0  # OPEN to ACCEPT or REFUSE; also a new connection until its OPEN
    peer_timeout_s: float = 5.0  # no byte in either direction
    working_interval_s: float = 1.0  # between two WORKING while there is nothing to send
    release_s: float = 1.0  # a forced-closed pull must let go of its memory; then quarantine
    stuck_step_s: float = 60.0  # WORKING that repeats one step for longer is silence


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections one transport keeps, and for how long an idle one."""

    max_connections: int = 512  # accepted, busy or idle
    max_idle: int = 64  # waiting for another pull, on each side
    idle_s: float = 60.0  # the serving side; the asking side gives up at half of it, so it closes first
