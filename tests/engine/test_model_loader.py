"""Loading: what is shared, what is silent, what a bad checkpoint is told, and the comparison at the end of it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineError, ModelRefused
from engine.model_loader import load_model
from engine.sampling import SamplingParams
from tests.engine.engines import Request, generate, running
from tests.engine.tiny_models import save_tiny_model

ROOT = Path(__file__).parents[2]


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    return replace(EngineConfig(model=folder, dtype="float32", block_size=4, num_blocks=48), **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny llama, to be spoilt."""
    return save_tiny_model(tmp_path / "tiny", "llama", {})


def mapped_ranges(file: Path) -> list[range]:
    """Where `file` is mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if line.endswith(str(file))]
    return [range(int(start, 16), int(end, 16)) for start, end in spans]


def test_weights_stay_pages_of_the_file_that_all_processes_share(model_folder: Path) -> None:
    model = load_model(EngineConfig(model=model_folder, dtype="bfloat16")).model
    ranges = mapped_ranges((model_folder / "model.safetensors").resolve())
    assert ranges
    private = [
        name
        for name, parameter in model.named_parameters()
        if not any(parameter.data_ptr() in mapped for mapped in ranges)
    ]
    assert private == []
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_loading_prints_nothing(folder: Path) -> None:
    """No progress bar, no warning: a worker's log is its own."""
    code = f"""
import sys
from pathlib import Path
from engine.config import EngineConfig
from engine.engine import Engine
Engine.load(EngineConfig(model=Path({str(folder)!r}), num_blocks=48))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_a_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def cut_in_half(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop_a_weight, r"the checkpoint has no model.layers.2.mlp.up_proj.weight \(1 weights are missing\)"),
        (change_a_shape, "weights that can't be loaded: "),
        (cut_in_half, "weights that can't be loaded: "),
        (lambda folder: (folder / "model.safetensors").unlink(), "weights that can't be loaded: "),
        (lambda folder: (folder / "config.json").unlink(), "no model configuration that transformers knows"),
        (lambda folder: (folder / "config.json").write_text("{"), "no model configuration that transformers knows"),
        (edit_config(model_type="none such"), "no model configuration that transformers knows"),
        (shutil.rmtree, "no model configuration that transformers knows"),
    ],
    ids=["weight missing", "shape", "cut", "no weights", "no config", "bad config", "unknown type", "no folder"],
)
def test_a_bad_checkpoint_is_refused_with_its_reason(spoil: Callable[[Path], None], message: str, folder: Path) -> None:
    spoil(folder)
    with pytest.raises(ModelRefused, match=f"{re.escape(str(folder))}: .*{message}"):
        Engine.load(config_of(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int3"}, "--dtype int3 is not one of auto, bfloat16, float16, float32"),
        (
            {"max_num_seqs": 65, "max_num_batched_tokens": 64},
            "--max-num-batched-tokens 64 is less than --max-num-seqs 65",
        ),
        ({"num_blocks": None, "kv_cache_gb": 1e-9}, "--kv-cache-gb 1e-09 holds 0 blocks of .* bytes; raise it"),
        ({"num_blocks": 7}, "the KV cache has 7 blocks; it needs 8 at least"),
    ],
)
def test_options_that_cannot_work_are_refused(changes: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(EngineError, match=message):
        Engine.load(config_of(folder, **changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_state_outside_attention_is_found_by_the_comparison(dtype: str, folder: Path) -> None:
    """A layer that mixes each token with the one before it, as a convolution does."""
    loaded = load_model(config_of(folder, dtype=dtype))
    Engine.build(loaded, config_of(folder))

    def mix(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + torch.cat([torch.zeros_like(output[:, :1]), output[:, :-1]], 1)

    loaded.model.model.layers[1].mlp.register_forward_hook(mix)
    with pytest.raises(ModelRefused, match=r"llama: logits computed in chunks differ from the model's own by"):
        Engine.build(loaded, config_of(folder))


def test_identity_names_the_function_and_the_weights(folder: Path) -> None:
    first = load_model(config_of(folder)).identity
    assert load_model(config_of(folder)).identity == first
    weights = load_file(folder / "model.safetensors")
    tuned = {name: weight + 0.01 for name, weight in weights.items()}
    save_file(tuned, folder / "model.safetensors", metadata={"format": "pt"})
    second = load_model(config_of(folder)).identity
    assert replace(second, weights=first.weights) == first
    assert second.weights != first.weights
    edit_config(rms_norm_eps=1e-3)(folder)
    assert load_model(config_of(folder)).identity.base_model != first.base_model


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [(2, None, {2}), (2, 5, {2, 5}), ([2, 3], [3, 4], {2, 3, 4}), (None, None, set())],
)
def test_every_end_token_that_the_checkpoint_names_counts(
    in_config: Any, in_generation_config: Any, expected: set[int], folder: Path
) -> None:
    edit_config(eos_token_id=in_config)(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation_config}))
    assert load_model(config_of(folder)).eos_token_ids == expected


async def test_two_engines_in_one_process_do_not_meet(tmp_path: Path) -> None:
    engines = []
    for name in ("llama", "qwen3"):
        engines.append(Engine.load(config_of(save_tiny_model(tmp_path / name, name, {}))))
    request = Request(list(range(3, 30)), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    async with running(engines[0]), running(engines[1]):
        alone = [await generate(engine, [request]) for engine in engines]
        together = await asyncio.gather(*(generate(engine, [request] * 2) for engine in engines))
    assert together == [answer * 2 for answer in alone]
    assert alone[0] != alone[1]
