"""Which worker gets a request: plain functions over what is known of the workers."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable

from pdserve_wire.layout import can_pair
from router.fleet import Worker


def pick(workers: Iterable[Worker], avoid: Collection[tuple[str, int]]) -> Worker | None:
    """The least loaded, by this router's own open calls first: reports are a second old, and a burst
    within one must spread. Workers named in `avoid` (id and epoch) only when there is no other.
    """
    candidates = list(workers)
    preferred = [worker for worker in candidates if identity(worker) not in avoid]
    return min(preferred or candidates, key=_load, default=None)


def pick_decode(workers: Iterable[Worker], prefill: Worker | None, avoid: Collection[tuple[str, int]]) -> Worker | None:
    """As `pick`, of those that can take KV from `prefill`."""
    return pick((w for w in workers if prefill is None or can_pair(prefill.hello, w.hello)), avoid)


def identity(worker: Worker) -> tuple[str, int]:
    return worker.worker_id, worker.hello.epoch


def _load(worker: Worker) -> tuple[int, int, float]:
    return worker.num_in_flight, worker.load.num_waiting + worker.load.num_running, random.random()
