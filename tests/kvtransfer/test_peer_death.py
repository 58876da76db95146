"""A real process at the other end, killed (SIGKILL) or frozen (SIGSTOP) at each phase of a pull."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import kvtransfer
from kvtransfer.errors import PeerLostError, PeerSilentError
from kvtransfer.frames import FrameType
from kvtransfer.messages import TransferDeadlines
from kvtransfer.tcp import TcpTransport
from tests.kvtransfer.makers import (
    Offers,
    Probe,
    assert_nothing_left,
    contents,
    make_blocks,
    make_destination,
    make_request,
    soon,
)
from tests.kvtransfer.peer import BLOCK_NBYTES, DEADLINES

ROOT = Path(kvtransfer.__file__).parent.parent
NUM_BLOCKS = 40  # 10 MiB: more than both kernel buffers hold
SLACK_S = 1.5  # of a busy machine


class Peer:
    """`peer.py` with these arguments. Killed at the end, in whatever state it is."""

    def __init__(self, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kvtransfer.peer", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.first_line = self.read_line()

    def read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait(10)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@asynccontextmanager
async def make_tcp(probe: Probe | None = None, deadlines: TransferDeadlines = DEADLINES) -> AsyncIterator[TcpTransport]:
    with assert_nothing_left():
        transport = TcpTransport(deadlines)
        if probe is not None:
            transport.tap(probe)
        try:
            yield transport
        finally:
            await transport.close()


# Where this side's thread waits while the peer dies. A probe that stops nowhere: before the connection.
PHASES = {
    "open": lambda: Probe(stop_sending=(FrameType.OPEN, 0)),
    "first block": lambda: Probe(stop_writing=0),
    "middle block": lambda: Probe(stop_writing=NUM_BLOCKS // 2),
    "last block": lambda: Probe(stop_writing=NUM_BLOCKS - 1),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
async def test_decode_survives_a_prefill_that_dies_in_any_phase(phase: str, death: signal.Signals) -> None:
    probe, destination = PHASES[phase](), make_destination(NUM_BLOCKS, BLOCK_NBYTES)
    with Peer("serve", 0, NUM_BLOCKS, NUM_BLOCKS) as prefill:
        async with make_tcp(probe) as decode:
            pull = decode.pull(prefill.first_line, make_request(), destination)
            assert await probe.reached.wait(20.0)
            prefill.signal(death)
            probe.go.set()
            started = time.monotonic()
            with pytest.raises(PeerLostError if death == signal.SIGKILL else PeerSilentError):
                await soon(pull.result())
            assert time.monotonic() - started < (1.0 if death == signal.SIGKILL else DEADLINES.open_s + SLACK_S)
            assert await pull.wait_released()
            before = contents(destination)
            prefill.signal(signal.SIGCONT)
        assert contents(destination) == before


async def test_a_frozen_prefill_that_still_accepts_connections_is_silent_and_serves_when_it_thaws() -> None:
    destination = make_destination(4, BLOCK_NBYTES)
    with Peer("serve", 0, 4, 2) as prefill:
        async with make_tcp() as decode:
            prefill.signal(signal.SIGSTOP)
            with pytest.raises(PeerSilentError):
                await soon(decode.pull(prefill.first_line, make_request(), destination).result())
            prefill.signal(signal.SIGCONT)
        probe = Probe(stop_writing=1)
        async with make_tcp(probe, TransferDeadlines()) as decode:
            pull = decode.pull(prefill.first_line, make_request(pull_attempt=2), destination)
            assert await probe.reached.wait(20.0)
            probe.go.set()
            pull.abort()


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
async def test_prefill_gets_its_blocks_back_from_a_decode_that_dies(death: signal.Signals, is_finished: bool) -> None:
    """While blocks are sent; or while all are sent and prefill works on (a frozen peer is then seen at DONE)."""
    offers, probe = Offers(), Probe(stop_sending=(FrameType.BLOCK if is_finished else FrameType.WORKING, 0))
    offers.offer(make_blocks(NUM_BLOCKS, BLOCK_NBYTES), num_finished=None if is_finished else 1)
    async with make_tcp(probe) as prefill:
        address = await prefill.listen("127.0.0.1", 0, offers)
        with Peer("pull", address, NUM_BLOCKS) as decode:
            outgoing = await offers.next_opened()
            assert await probe.reached.wait(20.0)
            decode.signal(death)
            probe.go.set()
            started = time.monotonic()
            if death == signal.SIGSTOP:
                outgoing.finish(9, b"")
            error = await offers.next_error()
            assert isinstance(error, PeerLostError if death == signal.SIGKILL else PeerSilentError)
            assert time.monotonic() - started < (1.0 if death == signal.SIGKILL else DEADLINES.open_s + SLACK_S)
            assert await outgoing.wait_released(0.0)
    await offers.assert_no_leaks()


async def test_decode_finds_a_prefill_that_was_killed_and_started_again_on_its_port() -> None:
    async with make_tcp() as decode:
        port = 0
        for epoch in (1, 2):
            probe = Probe(stop_writing=1)
            decode.tap(probe)
            with Peer("serve", port, 2, 2) as prefill:
                port = int(prefill.first_line.rpartition(":")[2])
                destination = make_destination(2, BLOCK_NBYTES)
                pull = decode.pull(prefill.first_line, make_request(epoch=epoch), destination)
                assert await probe.reached.wait(20.0)
                assert bytes(destination[0]) == bytes(make_blocks(1, BLOCK_NBYTES)[0])
                prefill.signal(signal.SIGKILL)
                probe.go.set()
                with pytest.raises(PeerLostError):
                    await soon(pull.result(), 1.0)
