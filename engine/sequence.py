"""One sequence of tokens on its way through the engine: control state, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.output_stream import OutputStream
from engine.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the one scheduler that holds it.

    `token_ids` is the prompt, then the output so far, including the `num_emitted_tokens` that the
    client had before this sequence was built. KV exists for the first `num_computed_tokens` of them.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    num_emitted_tokens: int = 0
    choice: int = 0
    priority: int = 0  # smaller is served first
    ends_after_first_token: bool = False  # prefill's policy: then its blocks are offered, not freed
    num_computed_tokens: int = 0
    block_tables: tuple[list[int], ...] = field(default_factory=lambda: ([],))  # one for each layer group
    output: OutputStream = field(default_factory=OutputStream)
    arrival: int = -1  # order of arrival, given by the scheduler
    finish_reason: str | None = None
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_new_tokens(self) -> int:
        """Tokens whose KV is still missing: 1 while decoding, more while a prompt is read."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None
