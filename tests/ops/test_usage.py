"""`kvroute usage`: what keys, tenants and models have used."""

import pytest

from app.core.usage import HOUR_MS, UsageSums, Who
from app.ops.usage import hours_in
from app.state import usage
from app.state.scripts import ScriptRunner
from tests.fake_worker import KEYS
from tests.ops.test_explain import as_json, kvroute

USED = {
    Who("ann", "acme", "m"): UsageSums(3, 1, 0, 2000, 1500, 40, 2500, 1),
    Who("", "acme", "m"): UsageSums(requests=1),
    Who("", "", "other model"): UsageSums(requests=2, refused=2),
}


async def test_a_table_says_who_used_what(one_redis_server, redis):
    now = (await redis.time())[0] * 1000 // HOUR_MS
    runner = ScriptRunner(redis, 5.0)
    for number, hour in enumerate((now, now - 30), 1):
        await runner.one(usage.count(KEYS, hour, "r", number, USED, kept_ms=60_000))
    lines = (await kvroute(one_redis_server, "usage", "--since", "12h")).output.splitlines()
    assert lines[0].split() == [
        *("key", "requests", "failed", "refused", "prompt", "cached", "output", "waited")
    ]
    assert [line.split() for line in lines[1:]] == [
        ["ann", "3", "1", "0", "2,000*", "75%", "40*", "2.5", "s"],
        ["acme", "1", "0", "0", "0", "-", "0", "0.0", "s"],
        ["anonymous", "2", "0", "2", "0", "-", "0", "0.0", "s"],
        ["all", "6", "1", "2", "2,000*", "75%", "40*", "2.5", "s"],
    ]
    found = await as_json(one_redis_server, "usage", "--by", "tenant")
    assert {row["name"]: row["requests"] for row in found["rows"]} == {"acme": 8, "anonymous": 4}
    found = await as_json(one_redis_server, "usage", "--by", "model")
    assert {row["name"]: row["requests"] for row in found["rows"]} == {"m": 8, "other model": 4}


@pytest.mark.parametrize("text", ["", "7", "0h", "1w", "-1d", "3661d", "1 h"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match="needs hours or days"):
        hours_in(text)
