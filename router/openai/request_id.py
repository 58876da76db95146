"""`x-request-id`: on every response, the client's own where it is fit to be sent back."""

from __future__ import annotations

import uuid

from aiohttp import web

from router.front import checked_client_id

HEADER = "x-request-id"
_KEY = web.RequestKey("request_id", str)


def request_id_of(http: web.Request) -> str:
    """The id in the response's header; made at the first call."""
    if _KEY not in http:
        http[_KEY] = checked_client_id(http.headers.get(HEADER)) or f"req-{uuid.uuid4().hex}"
    return http[_KEY]


def name_request(http: web.Request, public_id: str) -> None:
    """Use this id; for requests that have a scope."""
    http[_KEY] = public_id


async def add_request_id(http: web.Request, response: web.StreamResponse) -> None:
    """For `Application.on_response_prepare`."""
    response.headers[HEADER] = request_id_of(http)
