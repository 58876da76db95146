"""The HTTP front: all routes in one `aiohttp` application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from router.front import Front
from router.health import HealthRoutes, Probes
from router.openai.chat import CHAT
from router.openai.completions import COMPLETIONS
from router.openai.errors import error_response
from router.openai.limits import HttpLimits
from router.openai.models import ModelRoutes
from router.openai.request_id import add_request_id, request_id_of
from router.openai.serve import GenerationRoute, serve
from router.scope import ClientGone

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(front: Front, probes: Probes, limits: HttpLimits | None = None) -> web.Application:
    """Serve it with `http_server`: a runner without `handler_cancellation` would not notice that a client left."""
    limits = limits or HttpLimits()

    def generation(route: GenerationRoute) -> _Handler:
        async def handle(http: web.Request) -> web.StreamResponse:
            return await serve(http, front, limits, route)

        return handle

    app = web.Application(client_max_size=limits.max_body_nbytes, middlewares=[_answer_errors])
    app.on_response_prepare.append(add_request_id)
    models = ModelRoutes(front)
    health = HealthRoutes(front, probes)
    app.add_routes(
        [
            web.post("/v1/chat/completions", generation(CHAT)),
            web.post("/v1/completions", generation(COMPLETIONS)),
            web.get("/v1/models", models.list),
            web.get("/v1/models/{model:.+}", models.get),
            web.get("/health", health.live),
            web.get("/ready", health.ready),
            web.get("/metrics", health.metrics),
            web.get("/debug/ledger", health.ledger),
            web.get("/debug/status", health.status),
            web.get("/debug/timeline/{id}", health.timeline),
        ]
    )
    return app


@asynccontextmanager
async def http_server(
    app: web.Application, host: str, port: int, limits: HttpLimits | None = None
) -> AsyncIterator[int]:
    """Serve until the block ends, then let running requests finish; gives the port (for `port` 0)."""
    limits = limits or HttpLimits()
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=limits.shutdown_s, handle_signals=False
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=1024)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@web.middleware
async def _answer_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ClientGone:
        raise  # nobody is there to be answered
    except Exception as error:
        return error_response(request, error, request_id_of(request))
