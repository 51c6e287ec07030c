"""A key has to do with its own requests, models, tenant and cache alone."""

import asyncio
import re

import orjson
import pytest

from app.core.settings.router import RouterSettings
from app.edge.app import create_app
from tests.door.conftest import replica, sick_worker, until_serving
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE

PATH = "/v1/completions"
PROMPT = [*range(1, 101)]
KEYS_FILE = """
ops o operator
ann a
bob b tenant=acme priority<=normal models=m*
eve e models=other-*
iso i isolate=yes
any y tenant=*
scraper s metrics
"""


def key(of):
    return {"authorization": f"Bearer {of}"}


@pytest.fixture
async def engine(redis):
    async with sick_worker(redis, "a") as one:
        yield one


@pytest.fixture
async def door(one_redis_server, engine, tmp_path):
    (tmp_path / "keys").write_text(KEYS_FILE)
    async with replica(one_redis_server.url, api_key_file=str(tmp_path / "keys")) as door:
        door.headers.update(key("o"))
        await until_serving(door, 1)
        del door.headers["authorization"]
        yield door


async def route(door, of, **more):
    return await door.post("/v1/route", json={"token_ids": PROMPT} | more, headers=key(of))


@pytest.mark.parametrize("end", ["DELETE", "prefill_complete", "source_complete", "worker_failed"])
async def test_only_the_key_of_a_request_ends_it(door, end):
    reply = (await route(door, "a", request_id="r1")).json()

    async def ended(of, name):
        path = f"/v1/requests/{name}"
        if end in ("DELETE", "worker_failed"):
            asked = {"worker_failed": "true"} if end == "worker_failed" else {}
            answer = await door.delete(path, params=asked, headers=key(of))
        else:
            answer = await door.post(f"{path}/{end}", headers=key(of))
        assert answer.status_code == 200, answer.text
        return bool(answer.json()["found"])

    names = ("r1", reply["reservation_id"])
    assert [await ended("b", name) for name in names] == [False, False]
    forged = names[1][:-8] + "00000000"
    assert not await ended("b", forged)
    if end != "source_complete":
        assert await ended("a", "r1")


async def test_a_key_takes_no_reservation_of_another_by_its_id(door):
    await route(door, "a", request_id="r1")
    await route(door, "b", request_id="r1", retry=True)
    workers = (await door.get("/v1/workers", headers=key("o"))).json()["workers"]
    assert [one["active_requests"] for one in workers] == [2]
    await route(door, "a", request_id="r1", retry=True)
    workers = (await door.get("/v1/workers", headers=key("o"))).json()["workers"]
    assert [one["active_requests"] for one in workers] == [2]


@pytest.mark.parametrize(
    ("of", "asked", "field"),
    [
        ("a", {"exclude": ["a:0"]}, "exclude"),
        ("a", {"policy": "random"}, "policy"),
        ("a", {"explain": True}, "explain"),
        ("a", {"tenant": "acme"}, "tenant"),
        ("b", {"tenant": "ann"}, "tenant"),
        ("b", {"priority": "high"}, "priority"),
        ("e", {}, "lora_name"),
        ("b", {"lora_name": "other-1"}, "lora_name"),
    ],
)
async def test_what_a_key_may_not_ask_for_is_refused_by_name(door, of, asked, field):
    reply = await route(door, of, **asked)
    assert (reply.status_code, reply.json()["error"]["field"]) == (403, field), reply.text
    assert (await route(door, "b", tenant="acme", priority="low")).status_code == 200
    assert (await route(door, "y", tenant="whoever")).status_code == 200
    if "lora_name" not in asked and field != "lora_name":
        assert (await route(door, "o", **asked)).status_code in (200, 503)


async def test_headers_set_neither_tenant_nor_priority_above_a_keys_own(door, redis):
    headers = {"x-tenant-id": "acme", "x-priority": "high"}
    for of, tenant in (("a", "ann"), ("b", "acme"), ("o", "acme"), ("y", "acme")):
        asked = {"model": "m", "prompt": PROMPT, "max_tokens": 1}
        reply = await door.post(PATH, json=asked, headers=key(of) | headers)
        assert reply.status_code == 200, reply.text

        async def tenants(of=of):
            found = (await door.get("/v1/usage?by=tenant", headers=key("o"))).json()
            return {row["name"]: row["requests"] for row in found["rows"]}

        assert tenant in await eventually(tenants, lambda found, tenant=tenant: tenant in found)


async def test_a_key_lists_and_asks_for_its_models_alone(door):
    asked = {"model": "m", "prompt": PROMPT, "max_tokens": 1}
    listed = {
        of: [card["id"] for card in (await door.get("/v1/models", headers=key(of))).json()["data"]]
        for of in "abe"
    }
    assert listed == {"a": ["m"], "b": ["m"], "e": []}
    without = {name: value for name, value in asked.items() if name != "model"}
    for path, body in (
        (PATH, asked),
        (PATH, without),
        ("/tokenize", asked),
        ("/tokenize", without),
    ):
        assert (await door.post(path, json=body, headers=key("e"))).status_code == 404, path
    count = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    reply = await door.post("/v1/messages/count_tokens", json=count, headers=key("e"))
    assert reply.status_code == 404
    assert (await door.get("/v1/models/m", headers=key("e"))).status_code == 404
    assert (await door.get("/v1/models/m", headers=key("b"))).status_code == 200
    assert (await door.post(PATH, json=asked, headers=key("b"))).status_code == 200


async def test_an_isolated_tenant_shares_no_cache_and_nobody_can_look_into_it(door, engine):
    asked = {"model": "m", "prompt": PROMPT, "max_tokens": 1}

    async def salt_sent(of, **more):
        reply = await door.post(PATH, json=asked | more, headers=key(of))
        assert reply.status_code == 200, reply.text
        assert "x-kvroute-overlap" not in reply.headers
        return engine.bodies[-1].get("cache_salt")

    assert await salt_sent("i") == "isolated:iso:"
    assert await salt_sent("i", cache_salt="own") == "isolated:iso:own"
    assert await salt_sent("a") is None
    assert await salt_sent("a", cache_salt="own") == "own"
    forged = await door.post(PATH, json=asked | {"cache_salt": "isolated:iso:"}, headers=key("a"))
    assert (forged.status_code, forged.json()["error"]["param"]) == (400, "cache_salt")
    hashes = {"local_hashes": [1, 2], "num_tokens": 8}
    for path in ("/v1/route", "/find_best_worker"):
        reply = await door.post(path, json=hashes, headers=key("a"))
        assert (reply.status_code, reply.json()["error"]["field"]) == (403, "local_hashes")
    reply = await route(door, "a", cache_namespace="isolated:iso:")
    assert (reply.status_code, reply.json()["error"]["field"]) == (422, "cache_salt")


RAW = "application/octet-stream"


async def asked_raw(door, of, method, path, body=b"", kind="application/json"):
    """The bytes of the whole answer, as they come from the socket."""
    reader, writer = await asyncio.open_connection(door.base_url.host, door.base_url.port)
    lines = (f"{method} {path} HTTP/1.1", "host: x", f"authorization: Bearer {of}")
    lines += (f"content-type: {kind}", "connection: close", f"content-length: {len(body)}")
    writer.write("\r\n".join((*lines, "", "")).encode() + body)
    try:
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


SECRETS = (b"overlap", b"bound", b"trust", b'"device"', b"candidates", b"locality", b"witness-")


async def test_overlap_figures_and_explanations_are_for_operators_alone(door, engine, redis):
    ids = orjson.dumps({"token_ids": PROMPT})
    hashes = orjson.dumps({"local_hashes": [1, 2], "num_tokens": 8})
    chat = orjson.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 1})
    stream = orjson.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 1, "stream": True})
    asks = [("POST", "/v1/route", ids), ("POST", PATH, chat), ("POST", PATH, stream)]
    for method, path, body in asks:
        shown, hidden = [await asked_raw(door, of, method, path, body) for of in "oa"]
        assert b" 200 OK" in shown
        assert b" 200 OK" in hidden
        assert b"overlap" in shown, "else nothing is hidden"
        assert not [secret for secret in SECRETS if secret in hidden.lower()], hidden
    assert b"overlap" in await asked_raw(door, "o", "POST", "/find_best_worker", hashes)
    for of, status in (("o", b" 200 OK"), ("a", b" 403 ")):
        raw = await asked_raw(door, of, "POST", "/v1/route?explain=true", b"\0" * 400, RAW)
        assert status in raw, raw
        assert any(secret in raw.lower() for secret in SECRETS) is (of == "o"), raw


async def test_a_key_sees_workers_of_its_models_alone_and_not_who_else_is_there(door, redis):
    async with sick_worker(redis, "other", models=("other-1",)):
        await eventually(
            lambda: asked_raw(door, "o", "GET", "/v1/workers"), lambda raw: b"other-1" in raw
        )
        for _ in range(9):
            asked = {"model": "m", "prompt": PROMPT, "max_tokens": 1}
            await door.post(PATH, json=asked, headers=key("b"))
        seen = {of: await asked_raw(door, of, "GET", "/v1/workers") for of in "abeo"}
        assert {of: (b'["m"]' in raw, b'["other-1"]' in raw) for of, raw in seen.items()} == {
            "a": (True, True),
            "b": (True, False),
            "e": (False, True),
            "o": (True, True),
        }
        metrics = {of: await asked_raw(door, of, "GET", "/metrics") for of in "ais"}
        assert b'key="bob"' in metrics["s"]
        assert all(b" 401 " in metrics[of] and b"bob" not in metrics[of] for of in "ai")


async def test_no_path_opens_to_a_key_that_is_forged_revoked_or_of_another_place(
    door, tmp_path, one_redis_server
):
    file = tmp_path / "keys"
    file.write_text(KEYS_FILE.replace("ann a\n", "ann new\n"))
    await eventually(
        lambda: door.get("/v1/models", headers=key("new")), lambda reply: reply.is_success
    )
    described = create_app(RouterSettings(redis_url=one_redis_server.url, namespace=NAMESPACE))
    open_paths = ("/health", "/readiness", "/", "/console")
    paths = [
        (method.upper(), re.sub(r"\{[^}]*\}", "x", path))
        for path, methods in described.openapi()["paths"].items()
        for method in methods
        if path not in open_paths and path != "/metrics"
    ]
    assert len(paths) > 20
    for of in ("a", "forged", "s", "a b", "A"):  # revoked, forged, for metrics alone
        for method, path in paths:
            reply = await door.request(method, path, headers=key(of))
            assert reply.status_code == 401, (of, method, path, reply.status_code)
    for method, path in paths:
        if path.startswith("/console/api/") or path == "/v1/usage":
            reply = await door.request(method, path, headers=key("b"))
            assert reply.status_code == 401, (method, path)
