"""GET /v1/models and /v1/models/{id}"""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from router.front import Front


class ModelRoutes:
    """The one served model, in OpenAI's form and with its `max_model_len`, as vLLM has it."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._created = int(time.time())

    async def list(self, http: web.Request) -> web.Response:
        self._front.api_keys.check(http.headers.get("Authorization", ""))
        return web.json_response({"object": "list", "data": [self._card()]})

    async def get(self, http: web.Request) -> web.Response:
        self._front.api_keys.check(http.headers.get("Authorization", ""))
        self._front.intake.check_model(http.match_info["model"])
        return web.json_response(self._card())

    def _card(self) -> dict[str, Any]:
        model = self._front.intake.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "pdserve",
            "max_model_len": model.max_model_len,
        }
