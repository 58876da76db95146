from pdserve_pb import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerHello(_message.Message):
    __slots__ = ("worker_id", "role", "grpc_address", "transfer_address", "metrics_address", "epoch", "pid", "model", "max_model_len", "protocol_min", "protocol_max", "transports", "layout")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    grpc_address: str
    transfer_address: str
    metrics_address: str
    epoch: int
    pid: int
    model: str
    max_model_len: int
    protocol_min: int
    protocol_max: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    layout: _worker_pb2.Layout
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., grpc_address: _Optional[str] = ..., transfer_address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., epoch: _Optional[int] = ..., pid: _Optional[int] = ..., model: _Optional[str] = ..., max_model_len: _Optional[int] = ..., protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., layout: _Optional[_Union[_worker_pb2.Layout, _Mapping]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("ready", "draining", "step", "step_age_s", "num_waiting", "num_running", "kv_blocks", "num_blocks", "num_prompt_tokens", "num_generation_tokens", "num_preemptions", "num_transfer_bytes", "num_handoffs", "num_transfer_failures")
    class KvBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFER_FAILURES_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    draining: bool
    step: int
    step_age_s: float
    num_waiting: int
    num_running: int
    kv_blocks: _containers.ScalarMap[str, int]
    num_blocks: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_preemptions: int
    num_transfer_bytes: int
    num_handoffs: int
    num_transfer_failures: int
    def __init__(self, ready: _Optional[bool] = ..., draining: _Optional[bool] = ..., step: _Optional[int] = ..., step_age_s: _Optional[float] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., kv_blocks: _Optional[_Mapping[str, int]] = ..., num_blocks: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_generation_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_transfer_bytes: _Optional[int] = ..., num_handoffs: _Optional[int] = ..., num_transfer_failures: _Optional[int] = ...) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ("hash", "stored")
    HASH_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    stored: bool
    def __init__(self, hash: _Optional[bytes] = ..., stored: _Optional[bool] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("hello", "load", "block_events")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BLOCK_EVENTS_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    load: WorkerLoad
    block_events: _containers.RepeatedCompositeFieldContainer[BlockEvent]
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., block_events: _Optional[_Iterable[_Union[BlockEvent, _Mapping]]] = ...) -> None: ...

class RouterBeat(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...
