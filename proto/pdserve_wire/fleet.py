"""What a worker says of itself on `Fleet.Report`, to protobuf and back."""

from __future__ import annotations

import math

from pdserve_pb import fleet_pb2 as pb
from pdserve_wire.messages import MalformedMessage, WorkerHello, WorkerLoad, layout_from_pb, layout_to_pb

ROLES = ("prefill", "decode", "both")


def hello_to_pb(hello: WorkerHello) -> pb.WorkerHello:
    return pb.WorkerHello(
        worker_id=hello.worker_id,
        role=hello.role,
        grpc_address=hello.grpc_address,
        transfer_address=hello.transfer_address,
        metrics_address=hello.metrics_address,
        epoch=hello.epoch,
        pid=hello.pid,
        model=hello.model,
        max_model_len=hello.max_model_len,
        protocol_min=hello.protocol_min,
        protocol_max=hello.protocol_max,
        transports=hello.transports,
        layout=layout_to_pb(hello.layout),
    )


def hello_from_pb(message: pb.WorkerHello) -> WorkerHello:
    """Raises `MalformedMessage` where a router could not call the worker by it."""
    if not message.worker_id or not message.grpc_address:
        raise MalformedMessage("hello: worker_id and grpc_address are required")
    if message.role not in ROLES:
        raise MalformedMessage(f"hello: role must be one of {', '.join(ROLES)}")
    if not message.HasField("layout"):
        raise MalformedMessage("hello: layout is required")
    return WorkerHello(
        worker_id=message.worker_id,
        role=message.role,
        grpc_address=message.grpc_address,
        transfer_address=message.transfer_address,
        metrics_address=message.metrics_address,
        epoch=message.epoch,
        pid=message.pid,
        model=message.model,
        max_model_len=message.max_model_len,
        layout=layout_from_pb(message.layout),
        transports=tuple(message.transports),
        protocol_min=message.protocol_min,
        protocol_max=message.protocol_max,
    )


def load_to_pb(load: WorkerLoad) -> pb.WorkerLoad:
    return pb.WorkerLoad(
        ready=load.is_ready,
        draining=load.is_draining,
        step=load.step,
        step_age_s=load.step_age_s,
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        kv_blocks=load.kv_blocks,
        num_blocks=load.num_blocks,
        num_prompt_tokens=load.num_prompt_tokens,
        num_generation_tokens=load.num_generation_tokens,
        num_preemptions=load.num_preemptions,
        num_transfer_bytes=load.num_transfer_bytes,
        num_handoffs=load.num_handoffs,
        num_transfer_failures=load.num_transfer_failures,
    )


def load_from_pb(message: pb.WorkerLoad) -> WorkerLoad:
    if not math.isfinite(message.step_age_s):
        raise MalformedMessage("load: step_age_s must be a number of seconds")
    return WorkerLoad(
        is_ready=message.ready,
        is_draining=message.draining,
        step=message.step,
        step_age_s=message.step_age_s,
        num_waiting=message.num_waiting,
        num_running=message.num_running,
        kv_blocks=dict(message.kv_blocks),
        num_blocks=message.num_blocks,
        num_prompt_tokens=message.num_prompt_tokens,
        num_generation_tokens=message.num_generation_tokens,
        num_preemptions=message.num_preemptions,
        num_transfer_bytes=message.num_transfer_bytes,
        num_handoffs=message.num_handoffs,
        num_transfer_failures=message.num_transfer_failures,
    )
