"""What the processes say to each other, as frozen dataclasses, and their protobuf forms.

Everything above the services and the clients speaks these types; protobuf stays at the border. Each
field is round-trip tested. A message that can't be a request of ours raises `MalformedMessage`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from engine.sampling import SamplingParams
from pdserve_pb import worker_pb2 as pb

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1


class MalformedMessage(ValueError):
    """A peer sent something that is no message of ours; the text names the field."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One token of one choice. `index` is its 0-based place in the output."""

    index: int
    token_id: int
    choice: int = 0
    generation: int = 0
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None  # None, "stop" or "length"


def make_token(
    index: int,
    token_id: int,
    *,
    generation: int,
    choice: int = 0,
    logprob: float | None = None,
    top_logprobs: Iterable[tuple[int, float]] = (),
    finish_reason: str | None = None,
) -> Token:
    """A token from the sampler's plain values."""
    top = tuple(TokenLogprob(top_id, value) for top_id, value in top_logprobs)
    return Token(index, token_id, choice, generation, logprob, top, finish_reason)


@dataclass(frozen=True, slots=True)
class Layout:
    """The form of a KV block and the function that it belongs to (docs/handoff.md, rule 5)."""

    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_nbytes: int
    base_model: str
    tokenizer: str
    position_encoding: str
    weights: str = ""
    num_groups: int = 1
    scales: str = "none"
    shard_index: int = 0
    num_shards: int = 1


@dataclass(frozen=True, slots=True)
class KvHandoff:
    """KV that waits at a prefill worker, whole or still growing, to be pulled once."""

    handoff_id: str
    address: str
    epoch: int
    num_tokens: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """A client's request as a worker sees it: token ids only. `token_ids` is the prompt, then the
    `num_emitted_tokens` that the client already has. `timeout_s` is what is left of its deadline.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    num_emitted_tokens: int = 0
    router_id: str = ""
    generation: int = 0
    timeout_s: float = 600.0
    priority: int = 0
    model: str = ""
    adapter: str = ""
    cache_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class PrefillTimings:
    queue_s: float = 0.0
    prefill_s: float = 0.0
    num_cached_tokens: int = 0
    num_chunks: int = 0


@dataclass(frozen=True, slots=True)
class KvComplete:
    """All KV has arrived, verified. Durations are the decode worker's (docs/metrics.md)."""

    transport: str
    num_bytes: int
    num_blocks: int
    transfer_s: float
    transfer_exposed_s: float
    room_wait_s: float
    hidden_s: float
    num_blocks_before_prefill_end: int


@dataclass(frozen=True, slots=True)
class DecodeTimings:
    decode_queue_s: float = 0.0
    first_step_s: float = 0.0
    prefill: PrefillTimings | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """Prefill holds every block of the prompt and is computing it."""

    handoff: KvHandoff


@dataclass(frozen=True, slots=True)
class First:
    """The first token, made by prefill."""

    tokens: tuple[Token, ...]
    timings: PrefillTimings


@dataclass(frozen=True, slots=True)
class Accepted:
    """Decode has validated and queued the request, room or not."""


@dataclass(frozen=True, slots=True)
class Tokens:
    tokens: tuple[Token, ...]
    timings: DecodeTimings | None = None


PrefillEvent = Started | First
DecodeEvent = Accepted | KvComplete | Tokens


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """Who a worker is; the first thing it says on `Fleet.Report`."""

    worker_id: str
    role: str
    grpc_address: str
    transfer_address: str
    metrics_address: str
    epoch: int
    pid: int
    model: str
    max_model_len: int
    layout: Layout
    transports: tuple[str, ...] = ("tcp",)
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How a worker is, each second. `kv_blocks` is the ledger by state: its sum is `num_blocks`."""

    is_ready: bool = False
    is_draining: bool = False
    step: int = 0
    step_age_s: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    kv_blocks: dict[str, int] = field(default_factory=dict)
    num_blocks: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_transfer_bytes: int = 0
    num_handoffs: int = 0
    num_transfer_failures: int = 0


_FINISH_TO_PB = {None: pb.FINISH_REASON_UNSPECIFIED, "stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
_FINISH_FROM_PB = {value: key for key, value in _FINISH_TO_PB.items()}


def sampling_to_pb(sampling: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        n=sampling.n,
    )


def sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=MappingProxyType(dict(message.logit_bias)),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        n=message.n,
    )


def token_to_pb(token: Token) -> pb.Token:
    return pb.Token(
        choice=token.choice,
        index=token.index,
        generation=token.generation,
        token_id=token.token_id,
        logprob=token.logprob,
        top_logprobs=[pb.TokenLogprob(token_id=t.token_id, logprob=t.logprob) for t in token.top_logprobs],
        finish_reason=_FINISH_TO_PB[token.finish_reason],
    )


def token_from_pb(message: pb.Token) -> Token:
    if message.finish_reason not in _FINISH_FROM_PB:
        raise MalformedMessage(f"finish_reason {message.finish_reason} is not known")
    return Token(
        choice=message.choice,
        index=message.index,
        generation=message.generation,
        token_id=message.token_id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple(TokenLogprob(t.token_id, t.logprob) for t in message.top_logprobs),
        finish_reason=_FINISH_FROM_PB[message.finish_reason],
    )


def layout_to_pb(layout: Layout) -> pb.Layout:
    return pb.Layout(**{f.name: getattr(layout, f.name) for f in fields(Layout)})


def layout_from_pb(message: pb.Layout) -> Layout:
    return Layout(**{f.name: getattr(message, f.name) for f in fields(Layout)})


def handoff_to_pb(handoff: KvHandoff) -> pb.KvHandoff:
    return pb.KvHandoff(
        handoff_id=handoff.handoff_id,
        address=handoff.address,
        epoch=handoff.epoch,
        num_tokens=handoff.num_tokens,
        layout=layout_to_pb(handoff.layout),
    )


def handoff_from_pb(message: pb.KvHandoff) -> KvHandoff:
    if not message.handoff_id or not message.address or not message.HasField("layout"):
        raise MalformedMessage("handoff: id, address and layout are required")
    return KvHandoff(
        handoff_id=message.handoff_id,
        address=message.address,
        epoch=message.epoch,
        num_tokens=message.num_tokens,
        layout=layout_from_pb(message.layout),
    )


def request_to_pb(request: WorkerRequest) -> pb.WorkerRequest:
    return pb.WorkerRequest(
        request_id=request.request_id,
        router_id=request.router_id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        num_emitted_tokens=request.num_emitted_tokens,
        sampling=sampling_to_pb(request.sampling),
        generation=request.generation,
        timeout_s=request.timeout_s,
        priority=request.priority,
        model=request.model,
        adapter=request.adapter,
        cache_salt=request.cache_salt,
    )


def request_from_pb(message: pb.WorkerRequest) -> WorkerRequest:
    """Raises `MalformedMessage` where the counts don't add up or a field isn't built yet."""
    if not message.request_id:
        raise MalformedMessage("request_id is required")
    if not message.HasField("sampling"):
        raise MalformedMessage("sampling is required")
    if message.HasField("grammar"):
        raise MalformedMessage("grammar: constrained output is not built yet")
    if message.num_prompt_tokens == 0:
        raise MalformedMessage("num_prompt_tokens must be at least 1")
    if message.num_prompt_tokens + message.num_emitted_tokens != len(message.token_ids):
        raise MalformedMessage("token_ids must be num_prompt_tokens + num_emitted_tokens long")
    if not math.isfinite(message.timeout_s):
        raise MalformedMessage("timeout_s must be a number of seconds")
    return WorkerRequest(
        request_id=message.request_id,
        router_id=message.router_id,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        num_emitted_tokens=message.num_emitted_tokens,
        sampling=sampling_from_pb(message.sampling),
        generation=message.generation,
        timeout_s=message.timeout_s,
        priority=message.priority,
        model=message.model,
        adapter=message.adapter,
        cache_salt=message.cache_salt,
    )


def prefill_timings_to_pb(timings: PrefillTimings) -> pb.PrefillTimings:
    return pb.PrefillTimings(**{f.name: getattr(timings, f.name) for f in fields(PrefillTimings)})


def prefill_timings_from_pb(message: pb.PrefillTimings) -> PrefillTimings:
    return PrefillTimings(**{f.name: getattr(message, f.name) for f in fields(PrefillTimings)})


def prefill_event_to_pb(event: PrefillEvent) -> pb.PrefillEvent:
    if isinstance(event, Started):
        return pb.PrefillEvent(started=handoff_to_pb(event.handoff))
    tokens = [token_to_pb(token) for token in event.tokens]
    return pb.PrefillEvent(first=pb.PrefillFirst(tokens=tokens, timings=prefill_timings_to_pb(event.timings)))


def prefill_event_from_pb(message: pb.PrefillEvent) -> PrefillEvent:
    match message.WhichOneof("event"):
        case "started":
            return Started(handoff_from_pb(message.started))
        case "first":
            tokens = tuple(token_from_pb(token) for token in message.first.tokens)
            return First(tokens, prefill_timings_from_pb(message.first.timings))
        case _:
            raise MalformedMessage("a prefill event that is neither started nor first")


def decode_event_to_pb(event: DecodeEvent) -> pb.DecodeEvent:
    if isinstance(event, Accepted):
        return pb.DecodeEvent(accepted=pb.Accepted())
    if isinstance(event, KvComplete):
        return pb.DecodeEvent(kv_complete=pb.KvComplete(**{f.name: getattr(event, f.name) for f in fields(KvComplete)}))
    tokens = pb.Tokens(tokens=[token_to_pb(token) for token in event.tokens])
    if event.timings is not None:
        tokens.timings.decode_queue_s = event.timings.decode_queue_s
        tokens.timings.first_step_s = event.timings.first_step_s
        if event.timings.prefill is not None:
            tokens.timings.prefill.CopyFrom(prefill_timings_to_pb(event.timings.prefill))
    return pb.DecodeEvent(tokens=tokens)


def decode_event_from_pb(message: pb.DecodeEvent) -> DecodeEvent:
    match message.WhichOneof("event"):
        case "accepted":
            return Accepted()
        case "kv_complete":
            return KvComplete(**{f.name: getattr(message.kv_complete, f.name) for f in fields(KvComplete)})
        case "tokens":
            timings = None
            if message.tokens.HasField("timings"):
                sent = message.tokens.timings
                prefill = prefill_timings_from_pb(sent.prefill) if sent.HasField("prefill") else None
                timings = DecodeTimings(sent.decode_queue_s, sent.first_step_s, prefill)
            return Tokens(tuple(token_from_pb(token) for token in message.tokens.tokens), timings)
        case _:
            raise MalformedMessage("a decode event of no known kind")
