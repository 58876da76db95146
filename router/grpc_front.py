"""The gRPC front: the same generation as over HTTP, with server reflection and the standard health service."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engine.sampling import SamplingParams
from pdserve_pb import generation_pb2 as pb
from pdserve_pb import generation_pb2_grpc as pb_grpc
from pdserve_wire.deadlines import DEADLINES
from pdserve_wire.errors import PdserveError, Reason, Refused
from router.front import Front, retry_advice
from router.intake import Ask, ChatPrompt, InvalidRequest, NotAuthorized, RequestError, UnknownModel
from router.metrics import num_cached_tokens
from router.reply import Piece, open_reply
from router.scope import RequestScope

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Generation"].full_name
DEFAULT_MAX_TOKENS = 16  # of a prompt; a chat may take all the room there is, as over HTTP

_Context = grpc.aio.ServicerContext[Any, Any]


async def add_grpc_front(server: grpc.aio.Server, front: Front, why_not_ready: Callable[[], str | None]) -> Health:
    """Add Generation, health and reflection to a server that is not started yet.

    `why_not_ready` gives None when requests can be served. Call `refresh` on what comes back when
    its answer may have changed: whoever watches the health is told then.
    """
    pb_grpc.add_GenerationServicer_to_server(GenerationServicer(front), server)
    serving = Health(why_not_ready)
    await serving.refresh()
    health_pb2_grpc.add_HealthServicer_to_server(serving, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return serving


class Health(health.aio.HealthServicer):  # type: ignore[misc,name-defined]
    """`grpc.health.v1.Health` of the whole server and of Generation, as one."""

    def __init__(self, why_not_ready: Callable[[], str | None]) -> None:
        super().__init__()
        self._why_not_ready = why_not_ready

    async def refresh(self) -> None:
        """Tell those who watch how it is now."""
        states = health_pb2.HealthCheckResponse
        status = states.SERVING if self._why_not_ready() is None else states.NOT_SERVING
        for service in (health.OVERALL_HEALTH, SERVICE):
            await self.set(service, status)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> Any:
        await self.refresh()
        return await super().Check(request, context)


class GenerationServicer(pb_grpc.GenerationServicer):
    """`pdserve.v1.Generation`. A call that is cancelled aborts its request."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        scope = self._front.open_scope("grpc", metadata.get("x-request-id"))
        request_id = scope.timeline.request_id
        await context.send_initial_metadata((("x-request-id", scope.public_id),))
        try:
            with scope:
                self._front.api_keys.check(metadata.get("authorization", ""))
                # before a copy is made of what may be millions of ids
                self._front.intake.check_room(len(request.tokens.token_ids), "tokens")
                await self._serve(parse(request, context.time_remaining()), scope, context)
        except Exception as error:
            code, details = to_client_status(error, request_id)
            await context.abort(code, details)

    async def _serve(self, ask: Ask, scope: RequestScope, context: _Context) -> None:
        scope.is_stream = True
        intake = self._front.intake
        prepared = await intake.prepare(ask, scope.timeline.request_id)
        scope.prepared(prepared)
        reply = open_reply(self._front.generator, prepared, scope.timeline, intake.model.tokenizer)
        async with aclosing(reply) as pieces:
            async for piece in pieces:
                if piece.text or piece.tokens or piece.finish_reason:
                    scope.first_byte()
                    await context.write(_response(piece, scope))
                if piece.finish_reason is not None:
                    scope.end(piece.finish_reason)


def parse(request: pb.GenerateRequest, remaining_s: float | None) -> Ask:
    """A call's message as an `Ask`, with the call's own deadline. Raises `InvalidRequest`."""
    if request.HasField("logprobs"):
        raise InvalidRequest("logprobs are not in the gRPC reply; use the HTTP front", "logprobs")
    has = request.HasField
    sampling = SamplingParams(
        min_tokens=request.min_tokens,
        temperature=request.temperature if has("temperature") else 1.0,
        top_p=request.top_p if has("top_p") else 1.0,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty if has("repetition_penalty") else 1.0,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=MappingProxyType(dict(request.logit_bias)),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
    )
    prompt = _prompt(request)
    return Ask(
        model=request.model,
        prompt=prompt,
        sampling=sampling,
        max_tokens=request.max_tokens if has("max_tokens") else None,
        default_max_tokens=None if isinstance(prompt, ChatPrompt) else DEFAULT_MAX_TOKENS,
        seed=request.seed if has("seed") else None,
        stops=tuple(request.stop),
        timeout_s=DEADLINES.request_s if remaining_s is None else min(remaining_s, DEADLINES.request_s),
    )


def _prompt(request: pb.GenerateRequest) -> str | tuple[int, ...] | ChatPrompt:
    match request.WhichOneof("input"):
        case "prompt":
            return request.prompt
        case "tokens":
            return tuple(request.tokens.token_ids)
        case "chat":
            if not request.chat.messages:
                raise InvalidRequest("chat has no messages; give at least one", "chat")
            if not all(message.role for message in request.chat.messages):
                raise InvalidRequest("each message needs a role, such as 'user'", "chat")
            messages = ({"role": message.role, "content": message.content} for message in request.chat.messages)
            return ChatPrompt(tuple(messages))
    raise InvalidRequest("the input is missing; give prompt, tokens or chat", "input")


def _response(piece: Piece, scope: RequestScope) -> pb.GenerateResponse:
    timeline = scope.timeline
    response = pb.GenerateResponse(
        request_id=timeline.request_id,
        text=piece.text,
        token_ids=[token.token_id for token in piece.tokens],
        finish_reason=piece.finish_reason or "",
    )
    if piece.finish_reason is not None:
        response.usage.prompt_tokens = timeline.num_prompt_tokens
        response.usage.completion_tokens = piece.num_tokens
        response.usage.cached_tokens = num_cached_tokens(timeline)
    return response


def to_client_status(error: Exception, request_id: str) -> tuple[grpc.StatusCode, str]:
    """The status that a client gets, and what it should change. An error of no known kind is logged."""
    match error:
        case UnknownModel():
            return grpc.StatusCode.NOT_FOUND, error.message
        case NotAuthorized():
            return grpc.StatusCode.UNAUTHENTICATED, error.message
        case RequestError() | Refused():
            return grpc.StatusCode.INVALID_ARGUMENT, error.message
        case PdserveError(reason=Reason.BUSY):
            return grpc.StatusCode.RESOURCE_EXHAUSTED, retry_advice(error)
        case PdserveError():
            return grpc.StatusCode.UNAVAILABLE, retry_advice(error)
    logger.error("request %s failed", request_id, exc_info=error)
    return grpc.StatusCode.INTERNAL, f"internal error; the router's log has it under {request_id}"
