"""Every failure as a status and a body of OpenAI's form, made in one place.

RequestError         router/intake.py has the rest of the tree
  +- BodyTooLarge    (413)
  +- BodyTooSlow     (408)
"""

from __future__ import annotations

import json
import logging
from typing import Any

from aiohttp import web

from pdserve_wire.errors import PdserveError, Reason, Refused
from router.front import retry_advice
from router.intake import InvalidRequest, NotAuthorized, RequestError, UnknownModel

logger = logging.getLogger(__name__)

BUSY_RETRY_AFTER_S = 1
RETRY_AFTER_S = 2


class BodyTooLarge(RequestError):
    """The body has more bytes than the server reads."""


class BodyTooSlow(RequestError):
    """The body did not arrive in time."""


_STATUS: dict[type[RequestError], int] = {
    InvalidRequest: 400,
    NotAuthorized: 401,
    UnknownModel: 404,
    BodyTooSlow: 408,
    BodyTooLarge: 413,
}


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(http: web.Request, error: Exception, request_id: str) -> web.Response:
    """The answer to a request that failed before its reply began."""
    headers: dict[str, str] = {}
    if isinstance(error, web.HTTPException):
        status, body = error.status, _http_error_body(http, error)
        if "Allow" in error.headers:
            headers["Allow"] = error.headers["Allow"]
    else:
        status, body = _status(error), failure_body(error, request_id)
        if isinstance(error, NotAuthorized):
            headers["WWW-Authenticate"] = "Bearer"
        if status in (429, 503):
            headers["Retry-After"] = str(BUSY_RETRY_AFTER_S if status == 429 else RETRY_AFTER_S)
    return web.Response(status=status, text=json.dumps(body), content_type="application/json", headers=headers)


def failure_body(error: Exception, request_id: str) -> dict[str, Any]:
    """The body alone: where a reply has begun, it is the last event. An error of no known kind is logged."""
    match error:
        case NotAuthorized():
            return error_body(error.message, "authentication_error", code="invalid_api_key")
        case RequestError():
            return error_body(error.message, "invalid_request_error", error.param, error.code)
        case Refused():
            return error_body(error.message, "invalid_request_error")
        case PdserveError(reason=Reason.BUSY):
            return error_body(retry_advice(error), "rate_limit_error", code="busy")
        case PdserveError():
            return error_body(retry_advice(error), "service_unavailable", code=error.reason.lower())
    logger.error("request %s failed", request_id, exc_info=error)
    return error_body(f"internal error; the router's log has it under {request_id}", "server_error")


def _status(error: Exception) -> int:
    match error:
        case RequestError():
            return _STATUS[type(error)]
        case Refused():
            return 400
        case PdserveError():
            return 429 if error.reason is Reason.BUSY else 503
    return 500


def _http_error_body(http: web.Request, error: web.HTTPException) -> dict[str, Any]:
    """What aiohttp itself refuses: unknown routes and wrong methods above all."""
    if error.status == 404:
        message = f"there is no {http.path}; see POST /v1/chat/completions, POST /v1/completions, GET /v1/models"
    elif error.status == 405:
        message = f"{http.path} does not take {http.method}; use {error.headers.get('Allow', 'another method')}"
    else:
        message = error.text or error.reason
    return error_body(message, "invalid_request_error" if error.status < 500 else "server_error")
