"""Which worker is picked, of workers that are only described."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from pdserve_wire.messages import WorkerHello, WorkerLoad
from router.fleet import Worker
from router.policy import are_tried, identity, pick, pick_decode, pick_prefill
from tests.router.played_workers import LAYOUT

NEWER = replace(LAYOUT, position_encoding="q")
NONE: Any = None


def make_worker(worker_id: str, num_in_flight: int = 0, num_running: int = 0, **hello: Any) -> Worker:
    described = WorkerHello(worker_id, "decode", "a:1", "", "", 1, 1, "m", 128, LAYOUT)
    load = WorkerLoad(is_ready=True, num_running=num_running)
    return Worker(replace(described, **hello), NONE, load, num_in_flight=num_in_flight)


def test_nobody_is_picked_of_none() -> None:
    assert pick([], set()) is None
    assert pick_prefill([], [make_worker("d")], set()) is None


def test_own_open_calls_count_before_what_was_reported_a_second_ago() -> None:
    busy, reported = make_worker("busy", num_in_flight=1), make_worker("reported", num_running=50)
    assert pick([busy, reported], set()) is reported
    assert pick([busy, make_worker("both", num_in_flight=1, num_running=1)], set()) is busy


def test_equals_are_picked_at_random() -> None:
    workers = [make_worker(str(number)) for number in range(4)]
    picked = Counter(worker.worker_id for _ in range(400) if (worker := pick(workers, set())))
    assert len(picked) == 4 and min(picked.values()) > 40


def test_who_has_failed_the_request_is_picked_only_when_there_is_no_other() -> None:
    failed, loaded = make_worker("failed"), make_worker("loaded", num_in_flight=9)
    assert pick([failed, loaded], {identity(failed)}) is loaded
    assert pick([failed, loaded], {identity(failed), identity(loaded)}) is failed
    restarted = make_worker("failed", epoch=2)
    assert pick([restarted, loaded], {identity(failed)}) is restarted, "another process"


def test_only_workers_of_one_model_layout_and_protocol_are_picked_to_go_on() -> None:
    prefill = make_worker("p", role="prefill")
    fits = [make_worker("d"), make_worker("other weights", layout=replace(LAYOUT, weights="int4"))]
    strangers = [
        make_worker("model", model="other"),
        make_worker("layout", layout=replace(LAYOUT, block_size=32)),
        make_worker("protocol", protocol_min=2, protocol_max=3),
    ]
    picked = {pick_decode([*strangers, *fits], prefill, set()) for _ in range(40)}
    assert picked == set(fits)
    assert pick_decode(strangers, prefill, set()) is None


def test_a_prefill_without_a_partner_is_never_picked() -> None:
    lonely, paired = make_worker("lonely", layout=NEWER), make_worker("paired", num_in_flight=9)
    decode = [make_worker("d")]
    assert pick_prefill([lonely, paired], decode, set()) is paired
    assert pick_prefill([lonely, paired], decode, {identity(paired)}) is paired
    assert pick_prefill([lonely], decode, set()) is None


def test_a_prefill_whose_partners_have_all_failed_the_request_is_picked_last() -> None:
    older, newer = make_worker("older"), make_worker("newer", num_in_flight=9, layout=NEWER)
    failed, other = make_worker("failed"), make_worker("other", layout=NEWER)
    assert pick_prefill([older, newer], [failed, other], set()) is older
    assert pick_prefill([older, newer], [failed, other], {identity(failed)}) is newer
    assert pick_prefill([older], [failed], {identity(failed)}) is older


def test_workers_are_tried_when_each_has_failed() -> None:
    workers = [make_worker("a"), make_worker("b")]
    assert not are_tried(workers, {identity(workers[0])})
    assert are_tried(workers, {identity(worker) for worker in workers})
