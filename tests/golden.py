"""The token ids that transformers gives for 30 prompts, in float32: what everything is compared with.

`make golden` (`python -m tests.golden`) writes `tests/golden/*.json` anew. Greedy is transformers'
`generate`; seeded is its logits and its warpers, then our counter-based draw, done naively here.

Beside each token stands its margin: how far the second best logit (greedy) or the nearest boundary of
the draw (seeded) was. A difference is excused only where that is within `MAX_LOGIT_GAP` or
`MAX_DRAW_GAP`; what follows an excused token is another text and proves nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.sampling import SamplingParams, uniform

FOLDER = Path(__file__).parent / "golden"
NUM_TOKENS = 64
MAX_LOGIT_GAP = 1e-4
MAX_DRAW_GAP = 1e-5
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_k=50, top_p=0.95, seed=1234, ignore_eos=True)

_FOX = "The quick brown fox jumps over the lazy dog while the sun sets behind the old mill. "
PROMPTS = (
    "Hello",
    "The capital of France is",
    "1, 2, 3, 5, 8, 13,",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a land far away, there lived a",
    "Q: What is the boiling point of water at sea level?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, COUNT(*) FROM users WHERE",
    "The three laws of thermodynamics are:\n1.",
    "<|im_start|>user\nWrite a poem about the sea.<|im_end|>\n<|im_start|>assistant\n",
    "日本の首都は",
    "中国的首都是北京。法国的首都是",
    "서울은 대한민국의",
    "Привет, как",
    "مرحبا بالعالم",
    "Γεια σου κόσμε",
    "नमस्ते दुनिया",
    "🎉🎂🥳 Happy birthday",
    "👩‍👩‍👧‍👦 is a family of",
    "I ❤️ NY. 🗽🌃 The city",
    "            ",
    "\n\n\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "{\"name\": \"Ada\", \"born\": 1815, \"known_for\":",
    "# Install\n\n```bash\npip install",
    _FOX * 4,
    _FOX * 12 + "Summarize the text above in one sentence:",
    "日本語の文章をここに長く書きます。" * 12,
    "for i in range(10):\n    print(i)\n" * 20,
    _FOX * 176,  # 3,000 tokens
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Golden:
    """One prompt and its continuation; `margins[i]` belongs to `output_ids[i]`."""

    prompt_ids: list[int]
    output_ids: list[int]
    margins: list[float]


def sampling_of(kind: str, number: int) -> SamplingParams:
    """What prompt `number` is sampled with: each seeded one has a seed of its own."""
    return GREEDY if kind == "greedy" else replace(SEEDED, seed=SEEDED.seed + number)


def load(kind: str) -> list[Golden]:
    """`kind` is greedy or seeded."""
    return [Golden(**one) for one in json.loads((FOLDER / f"{kind}.json").read_text())]


def assert_equal(golden: Golden, output_ids: list[int], kind: str, name: str) -> None:
    """Equal, or different first where the reference itself hung by a thread."""
    limit = MAX_LOGIT_GAP if kind == "greedy" else MAX_DRAW_GAP
    assert len(output_ids) == len(golden.output_ids), name
    for place, (ours, theirs) in enumerate(zip(output_ids, golden.output_ids, strict=True)):
        if ours != theirs:
            margin = golden.margins[place]
            assert margin <= limit, f"{name}: token {place} is {ours}, not {theirs}, with a margin of {margin:.3g}"
            return


def _make(model_folder: Path, kind: str, numbers: range = range(len(PROMPTS))) -> list[dict[str, Any]]:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, LogitsProcessorList

    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    made = []
    for number in numbers:
        prompt_ids = tokenizer.encode(PROMPTS[number]).ids
        chooser = _Chooser(sampling_of(kind, number))
        output = model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),  # else it hides pad tokens in the prompt
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            logits_processor=LogitsProcessorList([chooser]),
        )
        made.append(
            {"prompt_ids": prompt_ids, "output_ids": output[0, len(prompt_ids) :].tolist(), "margins": chooser.margins}
        )
        print(f"{kind} {number}: {len(prompt_ids)} tokens, margin {min(chooser.margins):.2g}", flush=True)
    return made


class _Chooser:
    """Within transformers' greedy search: leaves only the token that is to be chosen, and notes the margin."""

    def __init__(self, sampling: SamplingParams) -> None:
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        self.margins: list[float] = []
        self._sampling = sampling
        self._warpers = (
            []
            if sampling.is_greedy
            else [
                TemperatureLogitsWarper(sampling.temperature),
                TopKLogitsWarper(sampling.top_k),
                TopPLogitsWarper(sampling.top_p),
            ]
        )

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        import torch

        if self._sampling.is_greedy:
            best, second = scores[0].float().topk(2).values.tolist()
            self.margins.append(best - second)
            return scores
        for warper in self._warpers:
            scores = warper(input_ids, scores)
        cumulative = scores[0].double().softmax(-1).cumsum(-1)
        number = uniform(self._sampling.seed, 0, input_ids.shape[1])
        token_id = int(torch.searchsorted(cumulative, number * cumulative[-1], right=True))
        self.margins.append(float((cumulative - number).abs().min()))
        return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([token_id]), 0.0)


if __name__ == "__main__":
    from pdserve.models import resolve_model

    FOLDER.mkdir(exist_ok=True)
    for each in ("greedy", "seeded"):
        (FOLDER / f"{each}.json").write_text(json.dumps(_make(resolve_model("bundled"), each)) + "\n")
