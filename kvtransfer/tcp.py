"""Blocks over TCP sockets: the default transport, and the reference for the others.

Each accepted connection and each pull has a thread; none of them ever runs on the event loop. The
life of a pull is in `serving.py` (prefill) and `pull.py` (decode).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvtransfer.endpoint import Endpoint
from kvtransfer.errors import PeerLostError, PeerSilentError, TransferError
from kvtransfer.messages import ConnectionLimits, OpenRequest, TransferDeadlines
from kvtransfer.pull import SocketPull
from kvtransfer.server import PullServer
from kvtransfer.taps import Taps
from kvtransfer.transport import KvSource

logger = logging.getLogger(__name__)

_BACKLOG = 512
_ACCEPT_RETRY_S = 0.1  # when the system has no descriptor for a new connection


class TcpTransport:
    """A `Transport` for addresses "host:port" and "[v6]:port"."""

    name = "tcp"

    def __init__(self, deadlines: TransferDeadlines | None = None, limits: ConnectionLimits | None = None) -> None:
        dialer = TcpDialer((deadlines or TransferDeadlines()).connect_s)
        self._endpoint = Endpoint(self.name, dialer, deadlines, limits)
        self._listeners: list[_Listener] = []

    async def listen(self, host: str, port: int, source: KvSource) -> str:
        sock = _bind(host, port)
        try:
            address = format_address(*sock.getsockname()[:2])
            listener = _Listener(sock, self._endpoint.make_server(source))
            self._endpoint.threads.start(f"{self.name}-accept", listener.run)
        except BaseException:
            sock.close()
            raise
        self._listeners.append(listener)
        return address

    def pull(self, address: str, request: OpenRequest, blocks: Sequence[memoryview]) -> SocketPull:
        return self._endpoint.pull(address, request, blocks)

    def tap(self, taps: Taps) -> None:
        self._endpoint.tap(taps)

    async def close(self) -> None:
        while self._listeners:
            self._listeners.pop().stop()
        await self._endpoint.close()


class TcpDialer:
    """Tries each address of a name within one deadline."""

    def __init__(self, connect_s: float) -> None:
        self._connect_s = connect_s

    def dial(self, address: str) -> socket.socket:
        deadline = time.monotonic() + self._connect_s
        failure: TransferError = PeerLostError(f"{address} has no address")
        for family, kind, protocol, _, sockaddr in _resolve(address, self._connect_s):
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError as error:
                raise PeerLostError(f"no socket for {address}: {error.strerror}") from error
            try:
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                sock.connect(sockaddr)
                return sock
            except TimeoutError:
                failure = PeerSilentError(f"{address} does not answer")
            except OSError as error:
                failure = PeerLostError(f"{address} can't be reached: {error.strerror}")
            sock.close()
        raise failure


class _Listener:
    """Accepts for one server, in a thread."""

    def __init__(self, sock: socket.socket, server: PullServer) -> None:
        self._sock = sock
        self._server = server
        self._is_stopping = threading.Event()

    def run(self) -> None:
        with self._sock:
            while not self._is_stopping.is_set():
                try:
                    sock, _ = self._sock.accept()
                except OSError as error:
                    if not self._is_stopping.wait(_ACCEPT_RETRY_S):
                        logger.warning("accepting a connection failed: %s", error)
                    continue
                self._server.serve(sock)

    def stop(self) -> None:
        """The thread ends and closes the socket. Once only."""
        self._is_stopping.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # on Linux it ends a waiting accept


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, int]:
    """Raises `PeerLostError` when nobody can be there."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise PeerLostError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_dual = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)


_AddressInfo = list[tuple[Any, Any, int, str, Any]]  # socket.getaddrinfo's


def _resolve(address: str, timeout_s: float) -> _AddressInfo:
    """A number at once; a name in a thread that is left alone when the resolver is slow."""
    host, port = parse_address(address)
    with contextlib.suppress(socket.gaierror):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    answers: queue.SimpleQueue[_AddressInfo | OSError | UnicodeError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answers.put(error)

    threading.Thread(target=ask, name="kvtransfer-resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise PeerSilentError(f"the name of {address} was not resolved in time") from None
    if isinstance(answer, Exception):
        raise PeerLostError(f"the name of {address} can't be resolved: {answer}")
    return answer
