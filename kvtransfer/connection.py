"""A stream socket that carries frames, with a deadline on every wait.

Blocking, for one transfer thread. Large reads and writes are one system call each (MSG_WAITALL, and
sendmsg of header and block pairs), so the thread needs the interpreter seldom. `shutdown` is for
any thread and makes whatever call is running return; that the thread has then come back is the proof
that no byte is written to or read from a block any more (the kernel copies inside the call only).

OSErrors of the socket end here: they leave as `PeerLostError`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence

from kvtransfer.errors import PeerLostError, PeerSilentError, ProtocolError
from kvtransfer.frames import (
    HEADER_NBYTES,
    BlockFrame,
    ControlFrame,
    Frame,
    Header,
    decode_body,
    decode_header,
    encode,
    frame_type,
    verify,
)
from kvtransfer.messages import TransferDeadlines
from kvtransfer.taps import Taps

# A call that moves no byte for this long goes on to wait in poll, whose deadline is exact. No deadline itself.
_TICK = struct.pack("ll", 0, 100_000)
MAX_FRAMES = 32  # of one send: 64 buffers


class Connection:
    """Owns a connected socket. Carries one pull at a time."""

    def __init__(self, sock: socket.socket, deadlines: TransferDeadlines, taps: Taps) -> None:
        self._sock = sock
        self._deadlines = deadlines
        self._taps = taps
        self._lock = threading.Lock()  # a closed descriptor's number may belong to another socket
        self._is_shut = False
        self._is_closed = False
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TICK)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def shutdown(self) -> None:
        """Cut it, both ways. Any thread, any number of times."""
        with self._lock:
            self._is_shut = True
            if not self._is_closed:
                with contextlib.suppress(OSError):  # the peer was faster
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut it and give the descriptor back. Only for the thread that uses it."""
        self.shutdown()
        with self._lock:
            self._is_closed = True
            self._sock.close()

    def is_fresh(self) -> bool:
        """Whether another pull may use it: open, and nothing has come that nobody asked for."""
        return not self._is_shut and self._poll(select.POLLIN, 0.0) is None

    def send(self, frames: Sequence[Frame]) -> None:
        """At most `MAX_FRAMES`. Raises `PeerLostError`, or `PeerSilentError` when nothing could be sent."""
        buffers: list[memoryview] = []
        for frame in frames:
            index = frame.index if isinstance(frame, BlockFrame) else 0
            try:
                is_sent = self._taps.sending(frame_type(frame), index)
            except OSError as error:
                raise PeerLostError(f"sending failed: {error}") from error
            if is_sent:
                buffers += (memoryview(part) for part in encode(frame) if len(part))
        while buffers:
            num_sent = self._send_some(buffers)
            while buffers and num_sent >= buffers[0].nbytes:
                num_sent -= buffers.pop(0).nbytes
            if num_sent:
                buffers[0] = buffers[0][num_sent:]

    def receive_header(self, block_nbytes: int | None = None, until: float | None = None) -> Header:
        """The next frame's header. A deadline (`until`, monotonic) replaces the rule of silence."""
        data = bytearray(HEADER_NBYTES)
        self._fill(memoryview(data), until)
        return decode_header(data, block_nbytes)

    def receive_body(self, header: Header, until: float | None = None) -> ControlFrame:
        """Whatever a control frame carries, verified. Its length was bounded by `receive_header`."""
        body = bytearray(header.length)
        self._fill(memoryview(body), until)
        return decode_body(header, body)

    def receive_block(self, header: Header, destination: memoryview) -> None:
        """Straight into its place, then verified there: after `ChecksumError` wrong bytes lie in it."""
        self._taps.writing(header.index)
        self._fill(destination, None)
        self._taps.arrived(header.index, destination)
        verify(header, destination)

    def wait_quiet(self, wake: int, timeout_s: float) -> None:
        """Until the pipe `wake` has a byte, or the time is over. The peer has nothing to say meanwhile:
        raises `PeerLostError` when it leaves, `ProtocolError` when it speaks.
        """
        if self._poll(select.POLLIN, timeout_s, wake) is not None:
            self._raise_unasked()

    def wait_readable(self, timeout_s: float) -> bool:
        return self._poll(select.POLLIN, timeout_s) is not None

    def _send_some(self, buffers: list[memoryview]) -> int:
        deadline = time.monotonic() + self._deadlines.peer_timeout_s
        while True:
            try:
                return self._sock.sendmsg(buffers, [], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                if self._poll(select.POLLOUT, deadline - time.monotonic()) is None:
                    raise PeerSilentError("the peer takes nothing") from None
            except OSError as error:
                raise PeerLostError(f"the connection broke: {error.strerror}") from error

    def _fill(self, view: memoryview, until: float | None) -> None:
        last = time.monotonic()
        while view.nbytes:
            deadline = last + self._deadlines.peer_timeout_s if until is None else until
            try:
                num_received = self._sock.recv_into(view, view.nbytes, socket.MSG_WAITALL)
            except BlockingIOError:
                if self._poll(select.POLLIN, deadline - time.monotonic()) is None:
                    raise PeerSilentError("nothing came before the deadline") from None
                continue
            except OSError as error:
                raise PeerLostError(f"the connection broke: {error.strerror}") from error
            if num_received == 0:
                raise PeerLostError("the peer closed the connection")
            last = time.monotonic()
            if until is not None and last > until:
                raise PeerSilentError("a frame was not whole before the deadline")
            view = view[num_received:]

    def _poll(self, event: int, timeout_s: float, wake: int | None = None) -> int | None:
        """The socket's events, or None: the time is over, or `wake` was written to."""
        poller = select.poll()
        poller.register(self._sock, event)
        if wake is not None:
            poller.register(wake, select.POLLIN)
        events = dict(poller.poll(max(0.0, timeout_s) * 1000))
        return events.get(self._sock.fileno())

    def _raise_unasked(self) -> None:
        try:
            data = self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLostError(f"the connection broke: {error.strerror}") from error
        if data:
            raise ProtocolError("the peer spoke out of turn")
        raise PeerLostError("the peer closed the connection")
