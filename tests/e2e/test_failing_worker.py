"""A client that carries its requests itself says of a worker that it fails: that counts for the
client, at all replicas, and for nobody else."""

from app.state.scripts import ScriptRunner
from tests.edge.conftest import started_replica
from tests.eventually import eventually
from tests.fake_worker import KEYS, fake_agent, running

MINE, OTHERS, OPERATOR = (
    {"authorization": f"Bearer {key}"} for key in ("key-of-mine", "key-of-others", "key-of-ops")
)


async def routed(client, headers, **asked):
    """The worker that a request goes to; "": none."""
    body = {"token_ids": [1] * 8, **asked}
    answer = await client.post("/v1/route", json=body, headers=headers)
    return str(answer.json().get("worker_id", ""))


async def held_by_bad(client, name):
    """Route requests until worker `bad` has one; returns its id."""
    for number in range(1000):
        request_id = f"{name}-{number}"
        if await routed(client, MINE, request_id=request_id) == "bad":
            return request_id
    raise AssertionError("no request went to it")


async def test_a_client_s_word_about_a_worker_counts_for_that_client_at_all_replicas(
    one_redis_server, redis, tmp_path
):
    keys = tmp_path / "keys"
    keys.write_text("mine key-of-mine\nothers key-of-others\nops key-of-ops operator\n")
    url, runner = one_redis_server.url, ScriptRunner(redis, 5.0)
    async with (
        running(fake_agent(runner, KEYS, "bad")),
        running(fake_agent(runner, KEYS, "good")),
        started_replica(url, api_key_file=str(keys), policy="random") as one,
        started_replica(url, api_key_file=str(keys), policy="random") as other,
    ):
        for replica in (one, other):
            for worker in ("bad", "good"):
                await eventually(lambda by=replica: routed(by, OTHERS), worker.__eq__)
        held = [(one, await held_by_bad(one, "first")), (one, await held_by_bad(one, "second"))]
        held.append((other, await held_by_bad(other, "third")))
        for replica, request_id in held:
            path = f"/v1/requests/{request_id}?worker_failed=true"
            assert (await replica.delete(path, headers=MINE)).json()["found"]
        for replica in (one, other):
            assert {await routed(replica, MINE) for _ in range(20)} == {"good"}
            assert {await routed(replica, OTHERS) for _ in range(20)} == {"bad", "good"}
            shown = (await replica.get("/v1/workers", headers=OTHERS)).json()
            assert [worker["witnesses"] for worker in shown["workers"]] == [[], []]
            shown = (await replica.get("/v1/workers", headers=OPERATOR)).json()
            bad, good = sorted(shown["workers"], key=lambda worker: str(worker["worker_id"]))
            assert (bad["state"], bad["cause"], bad["witnesses"]) == (
                *("serving", "reported", ["mine"]),
            )
            assert (bad["failures"], good["witnesses"]) == (0, [])
