"""Every field of every message survives the wire, and what is no message of ours is refused."""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling import SamplingParams
from pdserve_pb import fleet_pb2, worker_pb2
from pdserve_wire import fleet, messages
from pdserve_wire.messages import (
    Accepted,
    DecodeTimings,
    First,
    KvComplete,
    KvHandoff,
    Layout,
    MalformedMessage,
    PrefillTimings,
    Started,
    Token,
    TokenLogprob,
    Tokens,
    WorkerHello,
    WorkerLoad,
    WorkerRequest,
)

LAYOUT = Layout(
    dtype="bfloat16",
    block_size=16,
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    block_nbytes=368640,
    base_model="SmolLM2-135M-Instruct",
    tokenizer="smollm",
    position_encoding="rope-100000",
)
HANDOFF = KvHandoff(handoff_id="unguessable", address="10.0.0.1:9000", epoch=5, num_tokens=75, layout=LAYOUT)
TOKEN = Token(index=3, token_id=504)
REQUEST = WorkerRequest(request_id="r1", token_ids=(1, 2, 3), num_prompt_tokens=3, sampling=SamplingParams())
HELLO = WorkerHello(
    worker_id="w1",
    role="prefill",
    grpc_address="10.0.0.1:8000",
    transfer_address="10.0.0.1:9000",
    metrics_address="10.0.0.1:7000",
    epoch=5,
    pid=77,
    model="SmolLM2-135M-Instruct",
    max_model_len=8192,
    layout=LAYOUT,
)
KV_COMPLETE = KvComplete(
    transport="tcp",
    num_bytes=1,
    num_blocks=1,
    transfer_s=0.0,
    transfer_exposed_s=0.0,
    room_wait_s=0.0,
    hidden_s=0.0,
    num_blocks_before_prefill_end=0,
)


def through_wire(to_pb: Callable[[Any], Any], from_pb: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Encode to bytes and decode again."""

    def cross(message: Any) -> Any:
        encoded = to_pb(message)
        return from_pb(type(encoded).FromString(encoded.SerializeToString()))

    return cross


prefill_event = through_wire(messages.prefill_event_to_pb, messages.prefill_event_from_pb)
decode_event = through_wire(messages.decode_event_to_pb, messages.decode_event_from_pb)
request = through_wire(messages.request_to_pb, messages.request_from_pb)
sampling = through_wire(messages.sampling_to_pb, messages.sampling_from_pb)

# An example of each message, and its way over the wire. What only travels inside another goes inside it.
MESSAGES: list[tuple[Any, Callable[[Any], Any]]] = [
    (SamplingParams(), sampling),
    (TOKEN, through_wire(messages.token_to_pb, messages.token_from_pb)),
    (
        TokenLogprob(504, -0.5),
        lambda it: decode_event(Tokens((replace(TOKEN, top_logprobs=(it,)),))).tokens[0].top_logprobs[0],
    ),
    (LAYOUT, through_wire(messages.layout_to_pb, messages.layout_from_pb)),
    (HANDOFF, through_wire(messages.handoff_to_pb, messages.handoff_from_pb)),
    (REQUEST, request),
    (PrefillTimings(), lambda it: prefill_event(First((TOKEN,), it)).timings),
    (Started(HANDOFF), prefill_event),
    (First((TOKEN,), PrefillTimings()), prefill_event),
    (Accepted(), decode_event),
    (KV_COMPLETE, decode_event),
    (DecodeTimings(), lambda it: decode_event(Tokens((TOKEN,), it)).timings),
    (Tokens((TOKEN,)), decode_event),
    (HELLO, through_wire(fleet.hello_to_pb, fleet.hello_from_pb)),
    (WorkerLoad(), through_wire(fleet.load_to_pb, fleet.load_from_pb)),
]
BY_TYPE = {type(example): (example, cross) for example, cross in MESSAGES}

# Values that differ from the example where "another of the same type" would be no valid message.
CHANGED: dict[tuple[type, str], dict[str, Any]] = {
    (WorkerRequest, "num_prompt_tokens"): {"num_prompt_tokens": 2, "num_emitted_tokens": 1},
    (WorkerRequest, "num_emitted_tokens"): {"num_prompt_tokens": 1, "num_emitted_tokens": 2},
    (WorkerRequest, "token_ids"): {"token_ids": (9, 0, 2**32 - 1)},
    (WorkerHello, "role"): {"role": "both"},
    (Token, "finish_reason"): {"finish_reason": "length"},
}
# 0.7 is no float32: a field that is narrower on the wire fails.
ANOTHER: dict[Any, Any] = {
    int: 7,
    float: 0.7,
    str: "changed",
    bytes: b"\x00salt",
    bool: True,
    int | None: 0,
    float | None: 0.0,
    tuple[int, ...]: (5, 6),
    tuple[str, ...]: ("ucx", "tcp"),
    dict[str, int]: {"free": 9, "used": 1},
    Mapping[int, float]: {9: -100.0, 2**32 - 1: 0.7},
    SamplingParams: SamplingParams(temperature=0.7),
    Layout: replace(LAYOUT, num_layers=1),
    KvHandoff: replace(HANDOFF, epoch=2**64 - 1),
    PrefillTimings: PrefillTimings(queue_s=0.7),
    PrefillTimings | None: PrefillTimings(queue_s=0.7),
    DecodeTimings | None: DecodeTimings(first_step_s=0.7),
    tuple[Token, ...]: (TOKEN, replace(TOKEN, index=4)),
    tuple[TokenLogprob, ...]: (TokenLogprob(1, -0.7), TokenLogprob(2, -1.7)),
}


def each_field() -> list[Any]:
    cases = []
    for kind in BY_TYPE:
        types = typing.get_type_hints(kind)
        for field in fields(kind):
            change = CHANGED.get((kind, field.name)) or {field.name: ANOTHER.get(types[field.name])}
            cases.append(pytest.param(kind, change, id=f"{kind.__name__}.{field.name}"))
    return cases


@pytest.mark.parametrize("kind", BY_TYPE, ids=lambda kind: kind.__name__)
def test_every_message_arrives_as_it_was_sent(kind: type) -> None:
    example, cross = BY_TYPE[kind]
    assert cross(example) == example


@pytest.mark.parametrize(("kind", "change"), each_field())
def test_every_field_arrives_as_it_was_sent(kind: type, change: dict[str, Any]) -> None:
    example, cross = BY_TYPE[kind]
    changed = replace(example, **change)
    assert changed != example, "the test changes nothing"
    assert cross(changed) == changed


def test_every_dataclass_is_tested_here() -> None:
    defined = {
        kind
        for _, kind in inspect.getmembers(messages, inspect.isclass)
        if dataclasses.is_dataclass(kind) and kind.__module__ == messages.__name__
    }
    assert defined <= BY_TYPE.keys()


token_ids = st.integers(0, 2**32 - 1)
valid_sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**31 - 1),
    min_tokens=st.just(0),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=5),
    stop_token_ids=st.lists(token_ids, max_size=5).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)


@given(valid_sampling)
def test_sampling_that_is_valid_fits_the_wire_exactly(sent: SamplingParams) -> None:
    sent.validate()
    assert sampling(sent) == sent


def good_request() -> worker_pb2.WorkerRequest:
    return messages.request_to_pb(REQUEST)


def test_a_request_without_id_or_sampling_is_refused() -> None:
    for field in ("request_id", "sampling"):
        message = good_request()
        message.ClearField(field)
        with pytest.raises(MalformedMessage, match=field):
            messages.request_from_pb(message)


@pytest.mark.parametrize(("num_prompt", "num_emitted"), [(0, 3), (3, 1), (2, 0), (2**32 - 1, 0)])
def test_a_request_whose_counts_do_not_add_up_is_refused(num_prompt: int, num_emitted: int) -> None:
    message = good_request()
    message.num_prompt_tokens, message.num_emitted_tokens = num_prompt, num_emitted
    with pytest.raises(MalformedMessage, match="num_prompt_tokens"):
        messages.request_from_pb(message)


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, -math.inf])
def test_a_request_whose_deadline_is_no_time_is_refused(timeout_s: float) -> None:
    message = good_request()
    message.timeout_s = timeout_s
    with pytest.raises(MalformedMessage, match="timeout_s"):
        messages.request_from_pb(message)


def test_a_grammar_is_refused_until_it_is_obeyed() -> None:
    message = good_request()
    message.grammar.text = "{}"
    with pytest.raises(MalformedMessage, match="grammar"):
        messages.request_from_pb(message)


@pytest.mark.parametrize("field", ["handoff_id", "address", "layout"])
def test_a_handoff_that_leads_nowhere_is_refused(field: str) -> None:
    message = messages.handoff_to_pb(HANDOFF)
    message.ClearField(field)
    with pytest.raises(MalformedMessage, match="handoff"):
        messages.handoff_from_pb(message)


def test_an_event_of_no_known_kind_is_refused() -> None:
    with pytest.raises(MalformedMessage):
        messages.prefill_event_from_pb(worker_pb2.PrefillEvent())
    with pytest.raises(MalformedMessage):
        messages.decode_event_from_pb(worker_pb2.DecodeEvent())


def test_a_finish_reason_of_a_later_release_is_refused() -> None:
    message = worker_pb2.Token.FromString(b"\x38\x09")  # finish_reason = 9
    with pytest.raises(MalformedMessage, match="finish_reason 9"):
        messages.token_from_pb(message)


@pytest.mark.parametrize("field", ["worker_id", "grpc_address", "role", "layout"])
def test_a_hello_by_which_no_one_could_call_is_refused(field: str) -> None:
    message = fleet.hello_to_pb(HELLO)
    message.ClearField(field)
    with pytest.raises(MalformedMessage, match=field):
        fleet.hello_from_pb(message)


def test_a_load_with_a_step_of_no_age_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="step_age_s"):
        fleet.load_from_pb(fleet_pb2.WorkerLoad(step_age_s=math.nan))
