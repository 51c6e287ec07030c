from app.core.keys import Keyspace
from app.core.outcomes import Ending
from app.state import decisions
from app.state.scripts import ScriptRunner

KEYS = Keyspace("test")


async def test_endings_are_read_as_they_were_written_without_corrupted_ones(redis):
    runner = ScriptRunner(redis, timeout_s=5)
    await runner.one(decisions.record_ending(KEYS, "r1", Ending(7, 120), kept=100))
    await runner.one(decisions.record_ending(KEYS, "r2", Ending(3), kept=100))
    await redis.xadd(KEYS["endings"], {"request_id": "r9", "output_tokens": "-1", "ttft_ms": ""})
    found = await decisions.read_endings(redis, KEYS, 0, 10)
    assert {name: (one.output_tokens, one.ttft_ms) for name, one in found.items()} == {
        "r1": (7, 120),
        "r2": (3, None),
    }
    assert len(await decisions.read_endings(redis, KEYS, 0, 1)) == 2  # a page at least
    assert await decisions.read_endings(redis, KEYS, found["r2"].ended_ms + 60_000, 10) == {}
