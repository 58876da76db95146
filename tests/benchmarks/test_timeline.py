"""The timeline of one request, as it is printed."""

from __future__ import annotations

from benchmarks.timeline import describe

TIMELINE = {
    "num_prompt_tokens": 2000,
    "decision": "remote",
    "phases_s": {"tokenize": 0.002, "prefill": 1.5},
    "transfer": {
        "transport": "tcp",
        "num_bytes": 46_080_000,
        "num_blocks": 125,
        "transfer_s": 1.4,
        "transfer_exposed_s": 0.006,
        "hidden_s": 1.394,
        "num_blocks_before_prefill_end": 96,
    },
}


def test_it_says_how_much_had_arrived_before_the_prefill_ended() -> None:
    lines = describe(TIMELINE).splitlines()
    assert lines[0] == "prompt of 2000 tokens, remote prefill"
    assert lines[2].split() == ["prefill", "1500.0", "ms"]
    assert lines[-2] == "46.1 MB over tcp in 1400.0 ms: 1394.0 ms hidden under the prefill, 6.0 ms exposed"
    assert lines[-1] == "96 of 125 KV blocks had arrived before the prefill ended"


def test_it_says_where_nothing_was_moved() -> None:
    assert "no KV was moved" in describe({**TIMELINE, "decision": "local", "transfer": None})
