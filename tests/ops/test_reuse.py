"""`kvroute inspect funnel`: what replicas tell of reuse, as a picture and as JSON."""

from app.state import replicas
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from tests.fake_worker import KEYS, FakeWorkers
from tests.ops.test_explain import as_json, kvroute

ROWS = [
    ["llama", "prompt", "", 1000],
    ["llama", "seen", "new", 100],
    ["llama", "seen", "partial block", 50],
    ["llama", "held", "evicted", 250],
    ["llama", "chosen", "load", 100],
    ["llama", "used", "race", 25],
    ["", "prompt", "", 100],
    ["", "seen", "new", 100],
]


async def test_the_picture_and_the_json_say_where_the_reuse_of_all_replicas_went(
    one_redis_server, redis
):
    await FakeWorkers(redis).register("w1")
    nothing = await kvroute(one_redis_server, "inspect", "funnel")
    assert nothing.output == "no prompt was routed in the last hour by the 0 replicas that tell\n"
    async with connect(one_redis_server.url) as own:
        for name in ("a", "b"):
            await ScriptRunner(own, 5.0).one(replicas.beat(KEYS, name, {"reuse": ROWS}))
    lines = (await kvroute(one_redis_server, "inspect", "funnel")).output.splitlines()
    assert lines[0] == "all models: 2,200 prompt tokens"
    assert lines[6:] == [
        "llama: 2,000 prompt tokens",
        "  asked before        85.0% ██████████████████████████████████       "
        "lost: new 10.0%, partial block 5.0%",
        "  held by a worker    60.0% ████████████████████████                 lost: evicted 25.0%",
        "  by one with room    60.0% ████████████████████████",
        "  by the chosen one   50.0% ████████████████████                     lost: load 10.0%",
        "  used by its engine  47.5% ███████████████████                      lost: race 2.5%",
    ]
    models = (await as_json(one_redis_server, "inspect", "funnel"))["models"]
    assert list(models) == ["", "llama"]
    assert [models[""][name] for name in ("prompt_tokens", "seen", "used")] == [2200, 1700, 950]
    assert {"to": "held", "cause": "evicted", "tokens": 500} in models[""]["losses"]
