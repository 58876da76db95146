"""Which worker gets a request: plain functions over what is known of the workers.

`avoid` names (id and epoch) the workers that have failed this request.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence

from pdserve_wire.layout import can_pair
from router.fleet import Worker

Identity = tuple[str, int]


def pick(workers: Iterable[Worker], avoid: Collection[Identity]) -> Worker | None:
    """The least loaded, by this router's own open calls first: reports are a second old, and a burst
    within one must spread. Workers in `avoid` only when there is no other.
    """
    candidates = list(workers)
    preferred = [worker for worker in candidates if identity(worker) not in avoid]
    return min(preferred or candidates, key=_load, default=None)


def pick_prefill(workers: Iterable[Worker], decode: Sequence[Worker], avoid: Collection[Identity]) -> Worker | None:
    """As `pick`, of those whose KV one of `decode` can take, and rather one that isn't in `avoid` itself."""
    paired = [worker for worker in workers if partners(worker, decode)]
    hopeful = [worker for worker in paired if not are_tried(partners(worker, decode), avoid)]
    return pick(hopeful or paired, avoid)


def partners(prefill: Worker, decode: Iterable[Worker]) -> list[Worker]:
    """Those that can take KV from `prefill`."""
    return [worker for worker in decode if can_pair(prefill.hello, worker.hello)]


def are_tried(workers: Iterable[Worker], avoid: Collection[Identity]) -> bool:
    """Whether every one of them has failed this request."""
    return all(identity(worker) in avoid for worker in workers)


def identity(worker: Worker) -> Identity:
    return worker.worker_id, worker.hello.epoch


def _load(worker: Worker) -> tuple[int, int, float]:
    return worker.num_in_flight, worker.load.num_waiting + worker.load.num_running, random.random()
