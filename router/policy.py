"""Which worker gets a request: plain functions over what is known of the workers.

`avoid` names (id and epoch) the workers that have failed this request.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence

from pdserve_wire.layout import can_pair
from router.fleet import Worker

Identity = tuple[str, int]


def pick(
    workers: Iterable[Worker], avoid: Collection[Identity], fits: Callable[[Worker], bool] | None = None
) -> Worker | None:
    """The least loaded that fits, by this router's own open calls first: reports are a second old, and
    a burst within one must spread. Workers in `avoid` only when there is no other.
    """
    ranked = sorted(workers, key=lambda worker: (identity(worker) in avoid, *_load(worker)))
    return next((worker for worker in ranked if fits is None or fits(worker)), None)


def pick_prefill(workers: Sequence[Worker], decode: Sequence[Worker], avoid: Collection[Identity]) -> Worker | None:
    """As `pick`, of those whose KV one of `decode` can take, and rather one that isn't in `avoid` itself."""
    untried = [worker for worker in decode if identity(worker) not in avoid]

    def fits(partners: Iterable[Worker]) -> Callable[[Worker], bool]:
        return lambda worker: any(can_pair(worker.hello, partner.hello) for partner in partners)

    return pick(workers, avoid, fits(untried)) or pick(workers, avoid, fits(decode))


def pick_decode(workers: Iterable[Worker], prefill: Worker, avoid: Collection[Identity]) -> Worker | None:
    """As `pick`, of those that can take KV from `prefill`."""
    return pick(workers, avoid, lambda worker: can_pair(prefill.hello, worker.hello))


def are_tried(workers: Iterable[Worker], avoid: Collection[Identity]) -> bool:
    """Whether every one of them has failed this request."""
    return all(identity(worker) in avoid for worker in workers)


def identity(worker: Worker) -> Identity:
    return worker.worker_id, worker.hello.epoch


def _load(worker: Worker) -> tuple[int, int, float]:
    return worker.num_in_flight, worker.load.num_waiting + worker.load.num_running, random.random()
