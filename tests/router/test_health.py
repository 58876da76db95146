from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve_wire.auth import TOKEN_HEADER
from pdserve_wire.messages import WorkerLoad
from router.access import ApiKeys, is_operator
from router.intake import NotAuthorized
from router.metrics import WorkerGauges
from router.served_model import ServedModel
from tests.router.makers import MODEL, client_of, make_front, make_probes, post, saying, serving, until

TOKEN = "a-cluster-token-of-some-length"


async def ledger() -> Mapping[str, Any]:
    return {"prefill-0": {"free": 10}}


async def test_health_is_live_and_ready_follows_the_probe(model: ServedModel) -> None:
    reasons: list[str | None] = [None, "no decode worker is ready"]
    probes = make_probes(why_not_ready=lambda: reasons.pop(0))
    front = make_front(model, saying(model, " x"))
    async with serving(front, probes) as served, httpx2.AsyncClient(base_url=served.url) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        not_ready = await client.get("/ready")
    assert not_ready.status_code == 503 and not_ready.json()["reason"] == "no decode worker is ready"


async def test_metrics_are_what_a_scraper_reads(model: ServedModel) -> None:
    front = make_front(model, saying(model, " x"))
    load = WorkerLoad(num_waiting=3, kv_blocks={"free": 6, "cached": 1, "used": 3}, num_blocks=10)
    front.metrics.registry.register(WorkerGauges(MODEL, lambda: [("decode-0", "decode", load)]))
    async with serving(front) as served:
        await post(served.port, {"model": MODEL, "prompt": "Once"})
        async with httpx2.AsyncClient(base_url=served.url) as client:
            answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, sample.labels.get("state") or sample.labels.get("outcome")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert samples["pdserve_requests_total", "length"] == 1
    assert samples["pdserve_num_requests_waiting", None] == 3
    assert samples["pdserve_kv_cache_usage_ratio", None] == pytest.approx(0.3)
    assert samples["pdserve_kv_blocks", "used"] == 3


async def test_the_debug_routes_answer_this_machine(model: ServedModel) -> None:
    probes = make_probes(ledger=ledger, status=lambda: {"router": {"num_in_flight": 0}}, cluster_token=TOKEN)
    async with serving(make_front(model, saying(model, " x")), probes) as served:
        request_id = (await post(served.port, {"model": MODEL, "prompt": "Once"})).headers["x-request-id"]
        async with httpx2.AsyncClient(base_url=served.url) as client:
            assert (await client.get("/debug/ledger")).json() == {"prefill-0": {"free": 10}}
            assert (await client.get("/debug/status")).json() == {"router": {"num_in_flight": 0}}
            timeline = (await client.get(f"/debug/timeline/{request_id}")).json()
            assert (await client.get("/debug/timeline/nobody")).status_code == 404
            forwarded = await client.get("/debug/ledger", headers={"X-Forwarded-For": "10.0.0.9"})
            wrong = await client.get("/debug/ledger", headers={TOKEN_HEADER: "wrong"})
            right = await client.get("/debug/ledger", headers={"X-Forwarded-For": "10.0.0.9", TOKEN_HEADER: TOKEN})
    assert (timeline["outcome"], timeline["num_output_tokens"], timeline["request_id"]) == ("length", 1, request_id)
    assert forwarded.status_code == wrong.status_code == 403 and "error" in forwarded.json()
    assert right.status_code == 200


@pytest.mark.parametrize(
    ("peer", "is_forwarded", "given", "cluster_token", "is_allowed"),
    [
        ("127.0.0.1", False, None, TOKEN, True),
        ("::1", False, None, None, True),
        ("::ffff:127.0.0.1", False, None, None, True),
        ("127.0.0.1", True, None, TOKEN, False),
        ("10.0.0.9", False, None, TOKEN, False),
        ("10.0.0.9", False, TOKEN, TOKEN, True),
        ("10.0.0.9", False, "wrong", TOKEN, False),
        ("10.0.0.9", False, "\udcff", TOKEN, False),
        ("10.0.0.9", False, "", None, False),
        (None, False, None, TOKEN, False),
        ("", False, None, TOKEN, False),
    ],
)
def test_an_operator_is_on_this_machine_or_has_the_token(
    peer: str | None, is_forwarded: bool, given: str | None, cluster_token: str | None, is_allowed: bool
) -> None:
    assert is_operator(peer, is_forwarded, given, cluster_token) is is_allowed


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic right", "right", "Bearer \udcff"])
def test_a_wrong_api_key_is_refused(header: str) -> None:
    with pytest.raises(NotAuthorized):
        ApiKeys(("right", "other")).check(header)


@pytest.mark.parametrize("header", ["Bearer right", "bearer other", "Bearer  right "])
def test_a_right_api_key_is_taken(header: str) -> None:
    ApiKeys(("right", "other")).check(header)


async def test_api_keys_guard_the_models_and_nothing_else(model: ServedModel) -> None:
    front = make_front(model, saying(model, " x"), api_keys=("right",))
    async with serving(front) as served:
        refused = await post(served.port, {"model": MODEL, "prompt": "Once"})
        assert refused.status == 401 and refused.headers["www-authenticate"] == "Bearer"
        assert refused.error["code"] == "invalid_api_key"
        assert served.counted() == {"rejected": 1, "in flight": 0}
        async with client_of(served, "right") as client:
            await client.completions.create(model=MODEL, prompt="Once")
            assert [card.id async for card in client.models.list()] == [MODEL]
        async with client_of(served, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with httpx2.AsyncClient(base_url=served.url) as http:
            assert (await http.get("/health")).status_code == (await http.get("/metrics")).status_code == 200


async def test_models_are_listed_with_their_length(model: ServedModel) -> None:
    async with serving(make_front(model, saying(model, " x"))) as served, client_of(served) as client:
        card = await client.models.retrieve(MODEL)
        assert card.model_dump()["max_model_len"] == model.max_model_len and card.object == "model"
        with pytest.raises(openai.NotFoundError, match="smol"):
            await client.models.retrieve("org/other")


async def test_running_requests_may_end_when_the_server_stops(model: ServedModel) -> None:
    generator = saying(model, " one two three")
    async with serving(make_front(model, generator)) as served:
        answers = [asyncio.create_task(post(served.port, {"model": MODEL, "prompt": "Once"})) for _ in range(3)]
        await until(lambda: len(generator.requests) == 3)
    assert [(await answer).status for answer in answers] == [200] * 3
