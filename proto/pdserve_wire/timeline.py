"""Where one request's time went, in the phases of docs/metrics.md.

TTFT = tokenize + admission + prefill_queue + prefill + relay. The gap from token 0 to token 1 =
transfer_exposed + decode_queue + first_step + gap_relay. Workers report durations on their own
clocks; relay and gap_relay are the remainders, so both sums are exact.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

from pdserve_wire.messages import DecodeTimings, KvComplete, PrefillTimings

PHASES = (
    "tokenize",
    "admission",
    "prefill_queue",
    "prefill",
    "relay",
    "transfer_exposed",
    "decode_queue",
    "first_step",
    "gap_relay",
)


@dataclass(slots=True)
class RequestTimeline:
    """Filled by the router while the request runs. Times are seconds; `*_at` are `time.monotonic()`."""

    request_id: str
    arrived_at: float = field(default_factory=time.monotonic)
    tokenized_at: float | None = None  # text -> ids done
    admitted_at: float | None = None  # handed to a worker
    token_times: list[float] = field(default_factory=list)  # when the router had each output token
    ended_at: float | None = None
    outcome: str = ""  # stop, length, abort, error, rejected
    decision: str = ""  # remote: prefill pool; local: decode prefilled by itself
    prefill_worker: str = ""
    decode_worker: str = ""
    num_prompt_tokens: int = 0
    resume_reasons: list[str] = field(default_factory=list)  # why it was built again, each time
    num_mismatches: int = 0  # tokens that came twice and unequal
    prefill: PrefillTimings | None = None
    transfer: KvComplete | None = None
    decode: DecodeTimings | None = None

    @property
    def num_resumes(self) -> int:
        return len(self.resume_reasons)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_times)

    @property
    def ttft_s(self) -> float | None:
        return self.token_times[0] - self.arrived_at if self.token_times else None

    @property
    def handoff_gap_s(self) -> float | None:
        """From token 0 to token 1; 0 where no hand-off took place, None before there are two."""
        if len(self.token_times) < 2:
            return None
        return self.token_times[1] - self.token_times[0] if self.decision == "remote" else 0.0

    @property
    def e2e_s(self) -> float | None:
        return self.ended_at - self.arrived_at if self.ended_at is not None else None

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (n - 1), None for fewer than two tokens."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)

    def phases(self) -> dict[str, float]:
        """Seconds by phase, those that are known; the two sums above hold exactly."""
        phases: dict[str, float] = {}
        if self.tokenized_at is not None:
            phases["tokenize"] = self.tokenized_at - self.arrived_at
            if self.admitted_at is not None:
                phases["admission"] = self.admitted_at - self.tokenized_at
        ttft = self.ttft_s
        if ttft is not None and self.prefill is not None:
            phases["prefill_queue"] = self.prefill.queue_s
            phases["prefill"] = self.prefill.prefill_s
            phases["relay"] = ttft - sum(phases.values())
        gap = self.handoff_gap_s
        if gap and self.transfer is not None and self.decode is not None and not self.num_resumes:
            parts = {
                "transfer_exposed": self.transfer.transfer_exposed_s,
                "decode_queue": self.transfer.room_wait_s + self.decode.decode_queue_s,
                "first_step": self.decode.first_step_s,
            }
            phases |= parts
            phases["gap_relay"] = gap - sum(parts.values())
        return phases

    def as_dict(self) -> dict[str, object]:
        """For `/debug/timeline/ID` and `pdserve chat --timeline`."""
        return {
            "request_id": self.request_id,
            "outcome": self.outcome,
            "decision": self.decision,
            "prefill_worker": self.prefill_worker,
            "decode_worker": self.decode_worker,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_resumes": self.num_resumes,
            "ttft_s": self.ttft_s,
            "handoff_gap_s": self.handoff_gap_s,
            "tpot_s": self.tpot_s,
            "e2e_s": self.e2e_s,
            "phases_s": self.phases(),
            "transfer": asdict(self.transfer) if self.transfer else None,
        }
