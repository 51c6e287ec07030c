"""Where a prompt's reuse is lost: each step of real decisions, with fake workers."""

from app.ops.reuse import ALL, together
from app.policy.decision import Step
from app.router.reuse import EVERY_S, HOUR_S, MAX_MODELS
from tests.redis_servers import stopped
from tests.router.test_router import request, router, running, workers

__all__ = ["router", "workers"]

PROMPT = list(range(16))
"""Four full blocks of four."""


async def lost_by(replica, name, prompt, **options):
    decision = await replica.route(request(name, "latency", prompt=prompt, **options))
    if decision.reserved:
        await replica.release(decision.reservation_id)
    return {f"{step} {cause}": tokens for (step, cause), tokens in decision.lost.items()}


async def test_a_prompt_whose_tokens_are_not_known_is_lost_as_that(router, workers):
    await workers.register("w1")
    assert await lost_by(router, "r1", [1, 2], is_blind=True) == {"seen no tokens": 2}


async def test_what_was_asked_before_is_evicted_if_a_worker_once_held_it_and_unpublished_if_not(
    router, workers
):
    await workers.register("w1")
    assert await lost_by(router, "r1", [*PROMPT, 7]) == {"seen partial block": 1, "seen new": 16}
    assert await lost_by(router, "r2", PROMPT) == {"held unpublished": 16}
    await workers.publish("w1", PROMPT[:12])
    assert await lost_by(router, "r3", PROMPT) == {"held unpublished": 4}
    await workers.publish("w1", PROMPT[:12], None)
    assert await lost_by(router, "r4", PROMPT) == {"held unpublished": 4, "held evicted": 12}
    assert await lost_by(router, "r5", PROMPT[:8]) == {"held evicted": 8}


async def test_what_the_best_worker_held_is_lost_to_what_kept_the_request_from_it(router, workers):
    await workers.register("w1", max_requests=3)
    await workers.register("w2")
    await workers.register("w3")
    for worker in ("w1", "w2", "w3"):  # none is idle, to which a prefix might be given
        await workers.occupy(worker, f"at {worker}", prefill_s=0.0)
    await workers.publish("w1", PROMPT)
    await workers.publish("w2", PROMPT[:8])
    assert await lost_by(router, "r1", PROMPT) == {}
    excluded = frozenset({"w1"})
    assert await lost_by(router, "r2", PROMPT, exclude=excluded) == {"best excluded": 8}
    await workers.occupy("w1", "a", "b")
    assert await lost_by(router, "r3", PROMPT) == {"best full": 8}
    await workers.occupy("w2", "c", prefill_s=60.0)
    assert await lost_by(router, "r4", PROMPT) == {"best full": 8, "chosen load": 8}
    await workers.retire("w1")
    assert await lost_by(router, "r5", PROMPT) == {"best lease": 8, "chosen load": 8}


async def test_a_request_that_is_decided_again_has_not_been_asked_before(router, workers):
    await workers.register("w1")
    asked = request("r1", "latency", prompt=PROMPT)
    for _ in range(2):
        assert (await router.route(asked)).lost == {("seen", "new"): 16}


async def test_without_redis_everything_asked_before_is_lost_as_degraded(
    one_redis_server, router, workers
):
    await workers.register("w1")
    await lost_by(router, "r1", PROMPT)
    router.runner.timeout_s = 0.1
    with stopped(one_redis_server.pid):
        assert await lost_by(router, "r2", PROMPT) == {"held degraded": 16}


async def test_each_request_is_counted_once_and_as_its_engine_says(router, workers):
    await workers.register("w1")
    await workers.publish("w1", PROMPT)
    prompt = [*PROMPT, 99]
    told = await router.route(request("r1", "latency", prompt=prompt, carried=True))
    assert router.counted("reuse_tokens", model="m", step="prompt") == 0
    router.telemetry.reuse.ended(told, "m", 12)
    await router.route(request("r2", "latency", prompt=prompt, model="anything"))
    await router.route(request("r3", "latency", prompt=prompt, reserve=False))

    def steps(model):
        names = ("prompt", *Step, "unforeseen")
        return [router.counted("reuse_tokens", model=model, step=name) for name in names]

    assert steps("m") == [17, 16, 16, 16, 16, 12, 0]
    assert steps("") == [17, 16, 16, 16, 16, 0, 0]
    assert router.counted("reuse_lost_tokens", model="m", step="used", cause="race") == 4
    assert router.counted("reuse_lost_tokens", model="", step="used", cause="unreported") == 16


async def test_the_reuse_of_two_replicas_is_their_sum_of_the_last_hour(one_redis_server, workers):
    await workers.register("w1")
    said = []
    for cached in (0, 5):
        async with running(one_redis_server.url) as replica:
            began_s = replica.telemetry.reuse.began_s
            decision = await replica.route(request("r", "latency", prompt=PROMPT, carried=True))
            replica.telemetry.reuse.ended(decision, "m", cached)
            said.append({"reuse": replica.telemetry.reuse.lately(began_s + 1)})
            replica.telemetry.reuse.lately(began_s + EVERY_S)
            later = replica.telemetry.reuse.lately(began_s + HOUR_S + 3 * EVERY_S)
            assert [row for row in later if row[3]] == []
    shown = together([*said, {"reuse": [["m", "seen"]]}, {}])["models"]
    assert shown["m"] == shown[ALL]
    assert shown["m"] == {
        "prompt_tokens": 32,
        **dict.fromkeys(Step, 0),
        "unforeseen": 5,
        "losses": [{"to": "seen", "cause": "new", "tokens": 32}],
    }


async def test_models_beyond_a_bound_are_counted_as_one(router, workers):
    await workers.register("w1")
    decision = await router.route(request("r", prompt=PROMPT, carried=True))
    for number in range(MAX_MODELS + 5):
        router.telemetry.reuse.ended(decision, f"m{number}", None)
    models = {row[0] for row in router.telemetry.reuse.lately(router.telemetry.reuse.began_s)}
    assert len(models) == MAX_MODELS + 1
    assert router.counted("reuse_tokens", model="other", step="prompt") == 5 * 16
