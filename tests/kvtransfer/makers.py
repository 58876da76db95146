"""Makers of blocks, sources and pairs of transports, and what must hold when a test is over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from kvtransfer.errors import RefusedError, TransferError
from kvtransfer.faulty import FaultPlan, FaultyTransport, TappedTransport
from kvtransfer.frames import PROTOCOL_VERSION, Frame, FrameType, encode
from kvtransfer.inproc import InprocNetwork, InprocTransport
from kvtransfer.messages import ConnectionLimits, OpenRequest, TransferDeadlines
from kvtransfer.outgoing import Outgoing
from kvtransfer.tcp import TcpTransport, parse_address
from kvtransfer.threads import Latch
from kvtransfer.transport import Transport

T = TypeVar("T")

BLOCK_NBYTES = 4096
KINDS = ("tcp", "inproc", "faulty")  # faulty: with an empty plan, over inproc

# Only what a test waits out is short; the rest is what a worker would use.
DEADLINES = TransferDeadlines()
IMPATIENT = TransferDeadlines(open_s=0.3, peer_timeout_s=0.4, working_interval_s=0.1)


async def soon(awaitable: Awaitable[T], within_s: float = 20.0) -> T:
    """For what must happen: the time is only how long a broken test hangs."""
    return await asyncio.wait_for(awaitable, within_s)


async def until(condition: Callable[[], bool]) -> None:
    """For what has no event to await: a thread that ends by itself, bytes that appear."""
    async with asyncio.timeout(20.0):
        while not condition():
            await asyncio.sleep(0.005)


def make_blocks(num_blocks: int, block_nbytes: int = BLOCK_NBYTES, seed: int = 0) -> list[memoryview]:
    """Writable views into one buffer, filled with reproducible bytes."""
    return split(bytearray(random.Random(seed).randbytes(num_blocks * block_nbytes)), block_nbytes)


def make_destination(num_blocks: int, block_nbytes: int = BLOCK_NBYTES) -> list[memoryview]:
    return split(bytearray(b"\xee" * (num_blocks * block_nbytes)), block_nbytes)


def split(buffer: bytearray, block_nbytes: int) -> list[memoryview]:
    view = memoryview(buffer)
    return [view[start : start + block_nbytes] for start in range(0, len(buffer), block_nbytes)]


def contents(blocks: Sequence[memoryview]) -> list[bytes]:
    return [bytes(block) for block in blocks]


def make_request(handoff_id: str = "h", pull_attempt: int = 1, epoch: int = 7, **fields: object) -> OpenRequest:
    values: dict[str, object] = {
        "handoff_id": handoff_id,
        "pull_attempt": pull_attempt,
        "protocol_min": PROTOCOL_VERSION,
        "protocol_max": PROTOCOL_VERSION,
        "epoch": epoch,
        "layout": {"dtype": "float32", "num_layers": 2},
    }
    return OpenRequest(**(values | fields))  # type: ignore[arg-type]


class Offers:
    """A `KvSource`: a table of hand-offs, each pulled by the highest attempt, and of equal ones the latest."""

    def __init__(self) -> None:
        self.blocks: dict[str, Sequence[memoryview]] = {}
        self.num_finished: dict[str, int | None] = {}
        self.requests: list[OpenRequest] = []
        self.open_by_id: dict[str, tuple[int, Outgoing]] = {}
        self.all_opened: list[Outgoing] = []
        self.all_closed: list[Outgoing] = []
        self.opened: asyncio.Queue[Outgoing] = asyncio.Queue()
        self.closings: asyncio.Queue[tuple[Outgoing, TransferError | None]] = asyncio.Queue()

    def offer(self, blocks: Sequence[memoryview], handoff_id: str = "h", num_finished: int | None = None) -> None:
        """Prefill has finished all blocks and itself (None), or so many blocks as yet."""
        self.blocks[handoff_id] = blocks
        self.num_finished[handoff_id] = num_finished

    async def open(self, request: OpenRequest) -> Outgoing:
        self.requests.append(request)
        if request.handoff_id not in self.blocks:
            raise RefusedError("handoff_id", "unknown")
        lower = self.open_by_id.get(request.handoff_id)
        if lower is not None:
            if lower[0] > request.pull_attempt:
                raise RefusedError("pull_attempt", "superseded")
            lower[1].abort()
            assert await lower[1].wait_released(10.0)
        outgoing = Outgoing(self.blocks[request.handoff_id])
        num_finished = self.num_finished[request.handoff_id]
        if num_finished is None:
            outgoing.finish(100, b"first token")
        else:
            outgoing.publish(num_finished, 10, 1)
        self.open_by_id[request.handoff_id] = (request.pull_attempt, outgoing)
        self.all_opened.append(outgoing)
        self.opened.put_nowait(outgoing)
        return outgoing

    def closed(self, outgoing: Outgoing, error: TransferError | None) -> None:
        self.all_closed.append(outgoing)
        self.open_by_id = {key: pair for key, pair in self.open_by_id.items() if pair[1] is not outgoing}
        self.closings.put_nowait((outgoing, error))

    async def next_opened(self) -> Outgoing:
        return await soon(self.opened.get())

    async def next_error(self) -> TransferError | None:
        """What the next pull to be closed was closed with."""
        return (await soon(self.closings.get()))[1]

    async def assert_no_leaks(self) -> None:
        """Every `Outgoing` was closed exactly once, after its memory was released."""
        assert sorted(map(id, self.all_opened)) == sorted(map(id, self.all_closed))
        for outgoing in self.all_opened:
            assert await outgoing.wait_released(0.0)
            assert outgoing.blocks == ()


@dataclass
class Probe:
    """`Taps` that stop the thread at one point, and say so."""

    stop_sending: tuple[FrameType, int] | None = None
    stop_writing: int | None = None
    on_sending: Callable[[FrameType, int], None] | None = None
    reached: Latch = field(default_factory=Latch)
    go: threading.Event = field(default_factory=threading.Event)
    arrivals: list[int] = field(default_factory=list)

    def sending(self, kind: FrameType, index: int) -> bool:
        if self.on_sending is not None:
            self.on_sending(kind, index)
        if self.stop_sending == (kind, index):
            self._stop()
        return True

    def writing(self, index: int) -> None:
        if self.stop_writing == index:
            self._stop()

    def arrived(self, index: int, block: memoryview) -> None:
        self.arrivals.append(index)

    def _stop(self) -> None:
        self.reached.set()
        assert self.go.wait(20.0)


@dataclass
class Pair:
    prefill: Transport
    decode: Transport
    offers: Offers
    address: str
    network: InprocNetwork


def make_transport(
    kind: str, network: InprocNetwork, deadlines: TransferDeadlines = DEADLINES, limits: ConnectionLimits | None = None
) -> TappedTransport:
    if kind == "tcp":
        return TcpTransport(deadlines, limits)
    return InprocTransport(network, deadlines, limits)


def host_of(kind: str) -> str:
    return "127.0.0.1" if kind == "tcp" else "prefill"


@asynccontextmanager
async def make_pair(
    kind: str,
    deadlines: TransferDeadlines = DEADLINES,
    prefill: FaultPlan | Probe | None = None,
    decode: FaultPlan | Probe | None = None,
) -> AsyncIterator[Pair]:
    """A transport that listens for an `Offers`, and one that pulls. Afterwards nothing may be left of them."""
    network, offers = InprocNetwork(), Offers()
    with assert_nothing_left():
        transports: list[Transport] = []
        for fault in (prefill, decode):
            transport = make_transport(kind, network, deadlines)
            if isinstance(fault, Probe):
                transport.tap(fault)
            is_faulty = isinstance(fault, FaultPlan) or (kind == "faulty" and fault is None)
            plan = fault if isinstance(fault, FaultPlan) else FaultPlan()
            transports.append(FaultyTransport(transport, plan) if is_faulty else transport)
        address = await transports[0].listen(host_of(kind), 0, offers)
        try:
            yield Pair(transports[0], transports[1], offers, address, network)
        finally:
            for fault in (prefill, decode):
                if isinstance(fault, Probe):
                    fault.go.set()
            await asyncio.gather(*(transport.close() for transport in transports))
        await offers.assert_no_leaks()


@contextmanager
def assert_nothing_left() -> Iterator[None]:
    """No thread of ours and no descriptor more than before."""
    before = num_descriptors()
    yield
    for thread in transfer_threads():
        thread.join(0.5)  # it has said that it ended, and may be in its last instructions
    assert transfer_threads() == []
    assert num_descriptors() <= before


def transfer_threads(suffix: str = "") -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("kvtransfer-") and t.name.endswith(suffix)]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@asynccontextmanager
async def make_tcp_server(
    deadlines: TransferDeadlines = IMPATIENT, limits: ConnectionLimits | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[TcpTransport, Offers, str]]:
    """A transport that both serves and pulls; it offers two blocks as "h". Must still serve at the end."""
    offers = Offers()
    offers.offer(make_blocks(2))
    with assert_nothing_left():
        transport = TcpTransport(deadlines, limits)
        try:
            yield transport, offers, await transport.listen(host, 0, offers)
        finally:
            await transport.close()
    await offers.assert_no_leaks()


async def assert_serves(transport: TcpTransport, address: str) -> None:
    destination = make_destination(2)
    await soon(transport.pull(address, make_request(pull_attempt=99), destination).result())
    assert contents(destination) == contents(make_blocks(2))


def connect(address: str) -> socket.socket:
    return socket.create_connection(parse_address(address), 5.0)


def read_to_end(stranger: socket.socket) -> bytes:
    """All that comes until the other side closes. A reset ends it too."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := stranger.recv(1 << 16):
            data += part
    return data


def stream(*frames: Frame) -> bytes:
    return b"".join(bytes(part) for frame in frames for part in encode(frame))
