"""The next turn of a chat may be faster than the events of the last one."""

import pytest
from aiohttp import web

from app.router import lookup
from tests.door.conftest import completing, replica, until_serving

TOKENS = 2048
"""So few that none count as in flight."""


@pytest.mark.parametrize(
    ("status", "kept_s", "shown"),
    [(200, 600.0, "{0}/{1}; bound={0}"), (200, 0.0, "0/{1}"), (400, 600.0, "0/{1}")],
)
async def test_a_prompt_just_answered_is_held_by_its_worker_though_no_event_has_come(
    one_redis_server, redis, monkeypatch, status, kept_s, shown
):
    monkeypatch.setattr(lookup, "KEPT_S", kept_s)
    usage = {"prompt_tokens": TOKENS, "completion_tokens": 1}

    async def complete(request):
        await request.read()
        answer = {"choices": [{"text": "x"}], "usage": usage}
        return web.json_response(answer if status == 200 else {"error": {}}, status=status)

    async with (
        completing(redis, "a", complete) as worker,
        replica(one_redis_server.url) as client,
    ):
        await until_serving(client, 1)
        asked = {"model": "m", "prompt": list(range(TOKENS + 1))}
        size = worker.info.block_size
        first = await client.post("/v1/completions", json=asked)
        assert (first.status_code, first.headers["x-kvroute-overlap"][:2]) == (status, "0/")
        second = await client.post("/v1/completions", json=asked)
        full = TOKENS // size
        assert second.headers["x-kvroute-overlap"] == shown.format(full, full + 1)
        trust = "bound" if "bound" in shown else "exact"
        assert second.headers["x-kvroute-trust"] == trust
