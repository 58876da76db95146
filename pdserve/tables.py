"""What `pdserve chat --timeline` and `pdserve status` draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve_wire.timeline import PHASES

BAR_WIDTH = 32
_NUM_TTFT_PHASES = PHASES.index("relay") + 1


def draw_timeline(timeline: Mapping[str, Any], block: str = "█") -> str:
    """A request's phases one below the other, each a bar from its start to its end, then its figures."""
    phases: Mapping[str, float] = timeline.get("phases_s") or {}
    num_tokens = timeline.get("num_output_tokens") or 0
    e2e_s = timeline.get("e2e_s") or 0.0
    rows: list[tuple[str, float, float]] = []
    at_s = 0.0
    for number, name in enumerate(PHASES):
        if number == _NUM_TTFT_PHASES:
            at_s = timeline.get("ttft_s") or at_s
        if name in phases:
            rows.append((name, at_s, phases[name]))
            at_s += phases[name]
    if num_tokens > 1:
        rest = f"tokens {3 if 'first_step' in phases else 2} to {num_tokens}"
        rows.append((rest if e2e_s > at_s else "", at_s, max(0.0, e2e_s - at_s)))
    whole_s = max([e2e_s, *(start + length for _, start, length in rows)], default=0.0)
    width = max((len(name) for name, _, _ in rows), default=5)
    lines = [_headline(timeline), ""]
    if rows:
        lines.append(f"  {'phase':{width}}  {'start':>11}  {'length':>11}")
    for number, (name, start_s, length_s) in enumerate(rows):
        if number == _NUM_TTFT_PHASES:
            lines.append("")  # the first token is here
        bar = _bar(start_s, length_s, whole_s, block)
        lines.append(f"  {name:{width}}  {_ms(start_s):>8} ms  {_ms(length_s):>8} ms  {bar}".rstrip())
    return "\n".join([*lines, "", *_figures(timeline)])


def draw_status(status: Mapping[str, Any]) -> str:
    """The router, then a line a worker."""
    router: Mapping[str, Any] = status.get("router") or {}
    workers: Sequence[Mapping[str, Any]] = status.get("workers") or ()
    why_not = router.get("why_not_ready")
    state = f"not ready: {why_not}" if why_not else "ready"
    lines = [f"router {state}; {router.get('model', 'model')}; {router.get('num_in_flight', 0)} requests in flight", ""]
    if not workers:
        return "\n".join([*lines, "no workers have joined"])
    header = ("WORKER", "ROLE", "STATE", "RUNNING", "WAITING", "KV BLOCKS", "BEAT", "PID", "ADDRESS")
    return "\n".join([*lines, *align([header, *map(_worker_row, workers)], right={3, 4, 6, 7})])


def align(rows: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    """Lines of columns; those in `right` are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _worker_row(worker: Mapping[str, Any]) -> tuple[str, ...]:
    blocks: Mapping[str, int] = worker.get("kv_blocks") or {}
    held = [f"{count} {state}" for state, count in blocks.items() if count and state != "free"]
    free = f"{blocks.get('free', 0)} of {worker.get('num_blocks', 0)} free"
    state = "draining" if worker.get("is_draining") else "ready" if worker.get("is_ready") else "not ready"
    return (
        str(worker.get("worker_id", "")),
        str(worker.get("role", "")),
        state,
        str(worker.get("num_running", 0)),
        str(worker.get("num_waiting", 0)),
        ", ".join([free, *held]),
        f"{worker.get('age_s') or 0.0:.1f} s",
        str(worker.get("pid", "")),
        str(worker.get("grpc_address", "")),
    )


def _headline(timeline: Mapping[str, Any]) -> str:
    where = timeline.get("decode_worker") or "?"
    if timeline.get("decision") == "remote":
        where = f"{timeline.get('prefill_worker') or '?'} -> {where}"
    else:
        where = f"{where} alone"
    resumes = timeline.get("num_resumes") or 0
    resumed = f", resumed {resumes} times" if resumes > 1 else ", resumed once" if resumes else ""
    tokens = f"{timeline.get('num_prompt_tokens', 0)} prompt and {timeline.get('num_output_tokens', 0)} output tokens"
    return f"timeline of {timeline.get('request_id', '?')}: {tokens}, {where}, {timeline.get('outcome', '?')}{resumed}"


def _figures(timeline: Mapping[str, Any]) -> list[str]:
    num_tokens, e2e_s = timeline.get("num_output_tokens") or 0, timeline.get("e2e_s")
    gap_s = timeline.get("handoff_gap_s") or None  # 0: there was no hand-off
    figures = [
        ("TTFT", _ms_or_none(timeline.get("ttft_s")), "to the first token"),
        ("hand-off gap", _ms_or_none(gap_s), "from the first token to the second"),
        ("TPOT", _ms_or_none(timeline.get("tpot_s")), "for each token after the first"),
        ("whole", _ms_or_none(e2e_s), f"{num_tokens / e2e_s:.1f} tokens/s" if e2e_s else ""),
        ("KV moved", *_moved(timeline.get("transfer"))),
    ]
    return [f"  {name:12}  {value:>11}  {note}".rstrip() for name, value, note in figures if value]


def _moved(transfer: Mapping[str, Any] | None) -> tuple[str, str]:
    if not transfer:
        return "none", "the prompt was read where the reply was written"
    num_blocks = transfer.get("num_blocks", 0)
    early = transfer.get("num_blocks_before_prefill_end", 0)
    note = f"by {transfer.get('transport', '?')}: {num_blocks} blocks in {_ms(transfer.get('transfer_s') or 0.0)} ms"
    return _size(transfer.get("num_bytes", 0)), f"{note}, {early} of them before prefill ended"


def _bar(start_s: float, length_s: float, whole_s: float, block: str) -> str:
    if whole_s <= 0:
        return ""
    first = min(BAR_WIDTH - 1, round(start_s / whole_s * BAR_WIDTH))
    last = round((start_s + length_s) / whole_s * BAR_WIDTH)
    return " " * first + (block * (last - first) if last > first else "|")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"


def _ms_or_none(seconds: float | None) -> str:
    return "" if seconds is None else f"{_ms(seconds)} ms"


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
