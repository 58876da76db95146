from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids", "ignore_eos", "logprobs", "n")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    n: int
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., n: _Optional[int] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Grammar.Kind]
        JSON_SCHEMA: _ClassVar[Grammar.Kind]
        REGEX: _ClassVar[Grammar.Kind]
        LARK: _ClassVar[Grammar.Kind]
    KIND_UNSPECIFIED: Grammar.Kind
    JSON_SCHEMA: Grammar.Kind
    REGEX: Grammar.Kind
    LARK: Grammar.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: Grammar.Kind
    text: str
    def __init__(self, kind: _Optional[_Union[Grammar.Kind, str]] = ..., text: _Optional[str] = ...) -> None: ...

class WorkerRequest(_message.Message):
    __slots__ = ("request_id", "router_id", "token_ids", "num_prompt_tokens", "num_emitted_tokens", "sampling", "generation", "timeout_s", "priority", "model", "grammar", "adapter", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    router_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    num_emitted_tokens: int
    sampling: SamplingParams
    generation: int
    timeout_s: float
    priority: int
    model: str
    grammar: Grammar
    adapter: str
    cache_salt: bytes
    def __init__(self, request_id: _Optional[str] = ..., router_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., num_emitted_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., generation: _Optional[int] = ..., timeout_s: _Optional[float] = ..., priority: _Optional[int] = ..., model: _Optional[str] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[bytes] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("choice", "index", "generation", "token_id", "logprob", "top_logprobs", "finish_reason")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    choice: int
    index: int
    generation: int
    token_id: int
    logprob: float
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    finish_reason: FinishReason
    def __init__(self, choice: _Optional[int] = ..., index: _Optional[int] = ..., generation: _Optional[int] = ..., token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("dtype", "block_size", "num_layers", "num_kv_heads", "head_dim", "block_nbytes", "base_model", "tokenizer", "position_encoding", "weights", "num_groups", "scales", "shard_index", "num_shards")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NBYTES_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    POSITION_ENCODING_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_nbytes: int
    base_model: str
    tokenizer: str
    position_encoding: str
    weights: str
    num_groups: int
    scales: str
    shard_index: int
    num_shards: int
    def __init__(self, dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_nbytes: _Optional[int] = ..., base_model: _Optional[str] = ..., tokenizer: _Optional[str] = ..., position_encoding: _Optional[str] = ..., weights: _Optional[str] = ..., num_groups: _Optional[int] = ..., scales: _Optional[str] = ..., shard_index: _Optional[int] = ..., num_shards: _Optional[int] = ...) -> None: ...

class KvHandoff(_message.Message):
    __slots__ = ("handoff_id", "address", "epoch", "num_tokens", "layout")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    address: str
    epoch: int
    num_tokens: int
    layout: Layout
    def __init__(self, handoff_id: _Optional[str] = ..., address: _Optional[str] = ..., epoch: _Optional[int] = ..., num_tokens: _Optional[int] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ...) -> None: ...

class PrefillTimings(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "num_cached_tokens", "num_chunks")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    num_cached_tokens: int
    num_chunks: int
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., num_cached_tokens: _Optional[int] = ..., num_chunks: _Optional[int] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("started", "first")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    started: KvHandoff
    first: PrefillFirst
    def __init__(self, started: _Optional[_Union[KvHandoff, _Mapping]] = ..., first: _Optional[_Union[PrefillFirst, _Mapping]] = ...) -> None: ...

class PrefillFirst(_message.Message):
    __slots__ = ("tokens", "timings")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    timings: PrefillTimings
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., timings: _Optional[_Union[PrefillTimings, _Mapping]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("request", "handoff", "pull_attempt")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    PULL_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request: WorkerRequest
    handoff: KvHandoff
    pull_attempt: int
    def __init__(self, request: _Optional[_Union[WorkerRequest, _Mapping]] = ..., handoff: _Optional[_Union[KvHandoff, _Mapping]] = ..., pull_attempt: _Optional[int] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvComplete(_message.Message):
    __slots__ = ("transport", "num_bytes", "num_blocks", "transfer_s", "transfer_exposed_s", "room_wait_s", "hidden_s", "num_blocks_before_prefill_end")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    ROOM_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_S_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_BEFORE_PREFILL_END_FIELD_NUMBER: _ClassVar[int]
    transport: str
    num_bytes: int
    num_blocks: int
    transfer_s: float
    transfer_exposed_s: float
    room_wait_s: float
    hidden_s: float
    num_blocks_before_prefill_end: int
    def __init__(self, transport: _Optional[str] = ..., num_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., transfer_s: _Optional[float] = ..., transfer_exposed_s: _Optional[float] = ..., room_wait_s: _Optional[float] = ..., hidden_s: _Optional[float] = ..., num_blocks_before_prefill_end: _Optional[int] = ...) -> None: ...

class DecodeTimings(_message.Message):
    __slots__ = ("decode_queue_s", "first_step_s", "prefill")
    DECODE_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    decode_queue_s: float
    first_step_s: float
    prefill: PrefillTimings
    def __init__(self, decode_queue_s: _Optional[float] = ..., first_step_s: _Optional[float] = ..., prefill: _Optional[_Union[PrefillTimings, _Mapping]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("tokens", "timings")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    timings: DecodeTimings
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., timings: _Optional[_Union[DecodeTimings, _Mapping]] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("accepted", "kv_complete", "tokens")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    KV_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    kv_complete: KvComplete
    tokens: Tokens
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., kv_complete: _Optional[_Union[KvComplete, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ...) -> None: ...

class LedgerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LedgerResponse(_message.Message):
    __slots__ = ("worker_id", "json")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    json: str
    def __init__(self, worker_id: _Optional[str] = ..., json: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
