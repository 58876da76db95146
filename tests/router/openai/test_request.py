from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import SamplingParams
from pdserve_wire.messages import sampling_from_pb, sampling_to_pb
from router.intake import Ask, Intake, RequestError
from router.openai import chat, completions
from router.openai.request import Fields, parse_object, read_stream, refuse_unsupported
from router.served_model import ServedModel
from tests.router.makers import MODEL

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.5, -1.0, 1e308, 2**31, 2**32, 2**63, 2**64, 10**30, 49151, 49152])
    | st.text(max_size=3)
    | st.sampled_from([MODEL, "user", "text", "<|im_end|>", "\ud83d"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "1", "-1", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
OPENAI_FIELDS = ("messages", "max_completion_tokens", "stop", "top_logprobs", "stream", "stream_options", "best_of")
UNBUILT_FIELDS = ("echo", "tools", "response_format", "tool_choice")
FIELDS = [*SamplingParams.__dataclass_fields__, "model", "prompt", *OPENAI_FIELDS, *UNBUILT_FIELDS]
MESSAGES = [{"role": "user", "content": "Hello"}]


@settings(deadline=None, max_examples=400)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4), data=st.data())
def test_whatever_a_field_holds_it_is_served_or_refused(
    model: ServedModel, fields: dict[str, Any], data: st.DataObject
) -> None:
    parse: Callable[[Fields], Ask] = data.draw(st.sampled_from([chat.parse, completions.parse]))
    body = {"model": MODEL, "prompt": "Once", "messages": MESSAGES} | fields
    try:
        read = parse_object(json.dumps(body).encode())
        read_stream(read)
        refuse_unsupported(read)
        prepared = asyncio.run(Intake(model).prepare(parse(read), "r"))
    except RequestError as error:
        assert error.message
        return
    sampling = prepared.request.sampling
    assert 1 <= len(prepared.request.token_ids) <= model.max_model_len - sampling.max_tokens
    assert sampling_from_pb(sampling_to_pb(sampling)).max_tokens == sampling.max_tokens, "it can travel to a worker"


@given(data=st.binary(max_size=60))
def test_whatever_bytes_a_body_holds_it_is_an_object_or_refused(data: bytes) -> None:
    try:
        assert isinstance(parse_object(data), Fields)
    except RequestError as error:
        assert error.message


@pytest.mark.parametrize("num_repeats", [10, 5000])
async def test_a_long_prompt_is_tokenized_as_a_short_one_is(model_folder: Any, num_repeats: int) -> None:
    model = ServedModel.load(model_folder, MODEL, 8192)
    text = "cat " * num_repeats
    ask = completions.parse(Fields({"model": MODEL, "prompt": text}))
    prepared = await Intake(model).prepare(ask, "r")
    assert list(prepared.request.token_ids) == model.tokenizer.encode(text)
