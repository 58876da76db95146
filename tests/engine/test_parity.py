"""The bundled model in float32: whatever the engine is doing besides, a sequence gets what transformers gives it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model_loader import LoadedModel, load_model
from engine.sampling import SamplingParams
from tests import golden
from tests.engine.engines import Request, generate, running, shuffle_free_blocks
from tests.parity import assert_same_greedy, assert_same_seeded, reference_model

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(
    max_tokens=12,
    min_tokens=4,
    temperature=0.9,
    top_k=60,
    top_p=0.93,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={198: -3.0, 28: 1.5},
    ignore_eos=True,
)

pytestmark = pytest.mark.timeout(300)


def prompts() -> list[list[int]]:
    """Short, code, Japanese, emoji, middling, and one of about 700 tokens."""
    ids = [one.prompt_ids for one in golden.load("greedy")]
    return [ids[1], ids[3], ids[10], ids[17], ids[19], ids[25], ids[26], ids[27] * 2]


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(EngineConfig(model=model_folder, dtype="float32"))


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Any:
    return reference_model(model_folder)


def build(loaded: LoadedModel, **changes: int) -> Engine:
    config = EngineConfig(model=Path(), num_blocks=96, max_num_seqs=8, poison_freed_blocks=True)
    engine = Engine.build(loaded, replace(config, **changes))
    shuffle_free_blocks(engine)
    return engine


async def outputs_of(engine: Engine, requests: list[Request]) -> list[list[int]]:
    async with running(engine):
        return [[token.token_id for token in tokens] for tokens in await generate(engine, requests)]


async def test_greedy_equals_transformers_in_any_company(loaded: LoadedModel, reference: Any) -> None:
    """A budget that is no multiple of a block, and arrivals at any step: chunks of every length."""
    arrivals = random.Random(1)
    requests = [Request(ids, GREEDY, after_steps=arrivals.randrange(8)) for ids in prompts()]
    outputs = await outputs_of(build(loaded, max_num_batched_tokens=107), requests)
    for request, output in zip(requests, outputs, strict=True):
        assert len(output) == GREEDY.max_tokens
        assert_same_greedy(reference, request.prompt_ids, output)


async def test_greedy_is_the_text_that_generate_writes(loaded: LoadedModel, reference: Any) -> None:
    """Without teacher forcing, and with `generate`'s own KV cache: the helper's claim, checked on two prompts."""
    chosen = prompts()[:2]
    outputs = await outputs_of(build(loaded), [Request(ids, GREEDY) for ids in chosen])
    for ids, output in zip(chosen, outputs, strict=True):
        expected = reference.generate(
            torch.tensor([ids]), max_new_tokens=GREEDY.max_tokens, do_sample=False, eos_token_id=None
        )
        assert output == expected[0, len(ids) :].tolist()


async def test_seeded_equals_transformers_warpers_and_our_draw(loaded: LoadedModel, reference: Any) -> None:
    requests = [
        Request(ids, replace(SEEDED, seed=number), after_steps=number) for number, ids in enumerate(prompts()[:5])
    ]
    outputs = await outputs_of(build(loaded, max_num_batched_tokens=64), requests)
    for request, output in zip(requests, outputs, strict=True):
        assert_same_seeded(reference, request.prompt_ids, output, request.sampling, loaded.eos_token_ids)
    assert len({tuple(output) for output in outputs}) == len(outputs)


async def test_preempted_sequences_go_on_as_if_nothing_had_been(loaded: LoadedModel, reference: Any) -> None:
    """Four sequences that grow to 6 blocks each in a pool of 10; what is freed is NaN."""
    source = prompts()[5]
    requests = [
        Request(source[place : place + 10], replace(sampling, seed=place), after_steps=place)
        for place, sampling in enumerate((GREEDY, SEEDED, GREEDY, SEEDED))
    ]
    engine = build(loaded, num_blocks=10, block_size=4, max_num_batched_tokens=24)
    outputs = await outputs_of(engine, requests)
    assert engine.scheduler.num_preemptions >= 2
    for request, output in zip(requests, outputs, strict=True):
        if request.sampling.is_greedy:
            assert_same_greedy(reference, request.prompt_ids, output)
        else:
            assert_same_seeded(reference, request.prompt_ids, output, request.sampling, loaded.eos_token_ids)


async def test_an_end_token_ends_a_sequence_where_generate_ends_it(loaded: LoadedModel, reference: Any) -> None:
    """`ignore_eos` off: with one of the tokens that come anyway as the end."""
    ids = prompts()[1]
    (free,) = await outputs_of(build(loaded), [Request(ids, GREEDY)])
    end = next(token_id for place, token_id in enumerate(free) if place > 3 and token_id not in free[:place])
    sampling = replace(GREEDY, ignore_eos=False)
    engine = build(replace(loaded, eos_token_ids=frozenset({end})))
    stopping, ignoring = await outputs_of(engine, [Request(ids, sampling), Request(ids, GREEDY)])
    expected = reference.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=end)
    assert stopping == expected[0, len(ids) :].tolist() == free[: free.index(end) + 1]
    assert ignoring == free


def test_the_helpers_see_a_wrong_token(reference: Any) -> None:
    for kind in ("greedy", "seeded"):
        one = golden.load(kind)[4]
        sampling = golden.sampling_of(kind, 4)

        def check(output_ids: list[int], kind: str = kind, one: Any = one, sampling: Any = sampling) -> None:
            if kind == "greedy":
                assert_same_greedy(reference, one.prompt_ids, output_ids)
            else:
                assert_same_seeded(reference, one.prompt_ids, output_ids, sampling)

        check(one.output_ids)
        for place in (0, 30, 63):
            wrong = list(one.output_ids)
            wrong[place] = (wrong[place] + 1) % 49_152
            with pytest.raises(AssertionError, match=f"token {place} is {wrong[place]}, not "):
                check(wrong)
