"""What of a request goes on to an engine, and what of an answer comes back."""

import orjson
import pytest
from aiohttp import web

from app.core.errors import InvalidRequest
from app.door.forwarding import ONLY_ROUTERS, check, headers_back, headers_for_engine
from app.http.json_body import JsonBody
from tests.door.conftest import completing, replica, until_serving


def checked(**members):
    check(JsonBody.parse(orjson.dumps(members)))


@pytest.mark.parametrize("name", sorted(ONLY_ROUTERS))
def test_what_only_routers_may_say_is_refused(name):
    with pytest.raises(InvalidRequest, match="may only be set by a router") as refused:
        checked(model="m", **{name: 1})
    assert refused.value.field == name
    checked(model="m", **{name: None})


@pytest.mark.parametrize(
    "name", ["mm_transfer_params", "decode_bootstrap_host", "x_dp_rank", "lora_name", "Priority"]
)
def test_so_is_what_later_engines_may_have_for_routers(name):
    with pytest.raises(InvalidRequest, match="may only be set by a router"):
        checked(**{name: "x"})


@pytest.mark.parametrize(
    "members",
    [
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
        {"vllm_xargs": {"kv_cache_report_mode": 1}},
        {"custom_params": {"priority": 1}},
    ],
)
def test_so_is_what_is_hidden_in_an_object(members):
    with pytest.raises(InvalidRequest) as refused:
        checked(**members)
    assert refused.value.field == next(iter(members))


def test_a_name_in_such_an_object_comes_once():
    body = JsonBody.parse(b'{"vllm_xargs": {"a": 1, "a": 2}}')
    with pytest.raises(InvalidRequest, match="vllm_xargs: a: comes twice"):
        check(body)


def test_what_is_not_known_passes():
    checked(later={"a": [{}] * 1000}, safeguards=["x" * 50_000], mm_processor_kwargs={})


def test_headers_that_engines_obey_do_not_go_on():
    sent = [
        (b"accept", b"*/*"),
        (b"x-vllm-priority", b"-9"),
        (b"x-data-parallel-rank", b"1"),
        (b"x-smg-routing-key", b"a"),
        (b"content-type", b"text/plain"),
        (b"x-stainless-lang", b"python"),
        (b"user-agent", b"x"),
        (b"connection", b"close, User-Agent"),
    ]
    assert headers_for_engine(sent, "r", "")[:-2] == [
        (b"accept", b"*/*"),
        (b"x-stainless-lang", b"python"),
    ]


def test_headers_that_are_not_for_the_client_do_not_come_back():
    answered = [
        (b"content-type", b"application/json"),
        (b"set-cookie", b"a=b"),
        (b"x-kvroute-worker", b"false:0"),
        (b"x-hop", b"1"),
        (b"connection", b"keep-alive, X-Hop"),
        (b"keep-alive", b"timeout=5"),
        (b"openai-processing-ms", b"7"),
    ]
    assert headers_back(answered) == [
        (b"content-type", b"application/json"),
        (b"openai-processing-ms", b"7"),
    ]


async def test_an_engine_is_asked_only_what_may_be_asked(one_redis_server, redis):
    seen = []

    async def complete(request):
        seen.append(request)
        await request.read()
        return web.json_response({"tokens": []}, headers={"set-cookie": "a=b"})

    async with (
        completing(redis, "a", complete, path="/tokenize"),
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 1)

        async def ask(**members):
            headers = {"x-vllm-priority": "-1", "content-type": "text/plain"}
            body = orjson.dumps({"model": "m", "prompt": "x", **members})
            return await door.post("/tokenize", content=body, headers=headers)

        answer = await ask()
        assert answer.status_code == 200
        assert "set-cookie" not in answer.headers
        for name in ("chat_template", "kv_transfer_params", "priority"):
            assert (await ask(**{name: 1})).json()["error"]["param"] == name
        assert len(seen) == 1
        assert seen[0].headers["content-type"] == "application/json"
        assert "x-vllm-priority" not in seen[0].headers
