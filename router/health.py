"""What operators and their tools ask of a router."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from pdserve_wire.auth import TOKEN_HEADER
from router.access import is_operator
from router.front import Front


@dataclass(frozen=True, slots=True)
class Probes:
    """Where the answers come from.

    `why_not_ready` gives None when requests can be served, or else the reason. As plain data,
    `ledger` gives the state of all KV blocks of all workers, and `status` the router and its
    workers. Without a `cluster_token` only callers on this machine may see `/debug`.
    """

    why_not_ready: Callable[[], str | None]
    ledger: Callable[[], Awaitable[Mapping[str, Any]]]
    status: Callable[[], Mapping[str, Any]]
    cluster_token: str | None = None


class HealthRoutes:
    """/health, /ready, /metrics and /debug."""

    def __init__(self, front: Front, probes: Probes) -> None:
        self._front = front
        self._probes = probes

    async def live(self, http: web.Request) -> web.Response:
        """200 as long as the event loop turns."""
        return web.json_response({"status": "live"})

    async def ready(self, http: web.Request) -> web.Response:
        """200, or 503 with the reason."""
        reason = self._probes.why_not_ready()
        if reason is None:
            return web.json_response({"status": "ready"})
        return web.json_response({"status": "not ready", "reason": reason}, status=503)

    async def metrics(self, http: web.Request) -> web.Response:
        body, content_type = self._front.metrics.exposition()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def ledger(self, http: web.Request) -> web.Response:
        self._check_operator(http)
        return web.json_response(dict(await self._probes.ledger()))

    async def status(self, http: web.Request) -> web.Response:
        self._check_operator(http)
        return web.json_response(dict(self._probes.status()))

    async def timeline(self, http: web.Request) -> web.Response:
        self._check_operator(http)
        timeline = self._front.timelines.get(http.match_info["id"])
        if timeline is None:
            return web.json_response({"error": "this router has not (or no longer) served that request"}, status=404)
        return web.json_response(timeline)

    def _check_operator(self, http: web.Request) -> None:
        peer = http.transport.get_extra_info("peername") if http.transport else None
        is_forwarded = "Forwarded" in http.headers or "X-Forwarded-For" in http.headers
        given = http.headers.get(TOKEN_HEADER)
        if not is_operator(peer[0] if peer else None, is_forwarded, given, self._probes.cluster_token):
            raise web.HTTPForbidden(text=f"/debug is for callers on this machine or with {TOKEN_HEADER}")
