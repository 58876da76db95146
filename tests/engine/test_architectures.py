"""Tiny models of many architectures: served exactly as transformers' own attention would, or refused by name."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ModelRefused
from engine.sampling import SamplingParams
from tests.engine.engines import Request, generate, running, shuffle_free_blocks
from tests.engine.tiny_models import REFUSED, SERVED, VOCAB_SIZE, save_tiny_model

NUM_TOKENS = 16
LOGPROBS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=20)
PROMPT_LENGTHS = (23, 37, 11)
TOLERANCE = 2e-4


def config_of(folder: Path, max_model_len: int | None = None) -> EngineConfig:
    return EngineConfig(
        model=folder,
        dtype="float32",
        block_size=4,
        num_blocks=48,
        max_model_len=max_model_len,
        max_num_seqs=3,
        max_num_batched_tokens=9,
        poison_freed_blocks=True,
    )


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", SERVED)
async def test_equals_eager_attention_in_tokens_and_logits(name: str, tmp_path: Path) -> None:
    """Three sequences that arrive one after the other: chunks of up to 9 tokens beside decode tokens."""
    folder = save_tiny_model(tmp_path, name, SERVED[name])
    generator = random.Random(name)
    prompts = [[generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]
    engine = Engine.load(config_of(folder))
    shuffle_free_blocks(engine)
    async with running(engine):
        requests = [Request(prompt, LOGPROBS, after_steps=4 * place) for place, prompt in enumerate(prompts)]
        answers = await generate(engine, requests)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert [token.token_id for token in answer] == expected.sequences[0, len(prompt) :].tolist()
        for token, logits in zip(answer, expected.logits, strict=True):
            logprobs = logits[0].log_softmax(-1)
            ids = [token_id for token_id, _ in token.top_logprobs]
            ours = torch.tensor([logprob for _, logprob in token.top_logprobs])
            assert float((ours - logprobs[ids]).abs().max()) < TOLERANCE
            assert float((ours - logprobs.topk(20).values).abs().max()) < TOLERANCE


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name_with_the_reason(name: str, tmp_path: Path) -> None:
    changes, message, max_model_len = REFUSED[name]
    folder = save_tiny_model(tmp_path, name, changes)
    with pytest.raises(ModelRefused, match=message):
        Engine.load(config_of(folder, max_model_len))


@pytest.mark.parametrize(("name", "max_model_len"), [("llama4_text", 32), ("longrope", 128), ("dynamic rope", 512)])
def test_is_served_up_to_the_length_that_the_refusal_names(name: str, max_model_len: int, tmp_path: Path) -> None:
    changes, _, _ = REFUSED[name]
    folder = save_tiny_model(tmp_path, name, {**changes, "attn_temperature_tuning": False})
    engine = Engine.load(config_of(folder, max_model_len))
    assert engine.loaded.max_model_len == max_model_len
