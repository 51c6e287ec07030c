"""What `kvroute explain` prints of the decisions that Redis keeps."""

import asyncio
import json

import numpy as np
from click.testing import CliRunner

from app.cli import main
from app.core.trust import Trust
from app.core.types import TierOverlap
from app.ops.explain import explanation
from app.policy.cost import Candidates
from app.policy.locality import Best, Locality
from app.policy.record import ROWS, ChoiceInputs, DecisionRecord, encode
from app.state import decisions
from tests.fake_worker import KEYS, NAMESPACE


async def kvroute(server, *arguments):
    where = ["--redis-url", server.url, "--namespace", NAMESPACE]
    return await asyncio.to_thread(CliRunner().invoke, main, [*arguments, *where])


async def as_json(server, *arguments):
    result = await kvroute(server, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


async def keep(redis, *records):
    for one in records:
        await redis.xadd(KEYS["decisions"], {decisions.FIELD: encode(one)})


def decided(request_id, seen=None, **others):
    known = {
        "request_id": request_id,
        "at_ms": 0,
        "worker": "w1:0",
        "policy": "latency",
        "locality": Locality.LOAD,
        "isl_tokens": 41,
        "full_blocks": 10,
        "overlap": TierOverlap(3, 2, 1),
        "best": Best("w2:0", 9),
        "tries": 2,
        "waited_ms": 1500,
        "hex_blocks": f"{7:016x}",
        "seen": seen,
    }
    return DecisionRecord(**known | others)


async def test_explain_says_what_was_decided_and_why(one_redis_server, redis):
    await keep(
        redis, decided("r1"), decided("r2", best=Best("", 0), waited_ms=0, trust=Trust.BLIND)
    )
    assert (await kvroute(one_redis_server, "explain", "r1")).output.splitlines() == [
        "r1: 41 tokens to w1:0 by latency; the worker held 6 of 10 full blocks (3 on its device, "
        "2 in host memory, 1 on disk)",
        "another worker was cheaper, counting overlap and load; w2:0 held the most, 9; decided on "
        "try 2",
        "exact: overlap is what engines had published",
        "the request waited 1.50 s for a worker that could take it",
        "the candidates of this decision were not kept: see --details-per-s",
    ]
    assert (await kvroute(one_redis_server, "explain", "r2")).output.splitlines()[1:] == [
        "another worker was cheaper, counting overlap and load; decided on try 2",
        "blind: the prompt's tokens were not known, or its shard of the index was unreachable",
        "the candidates of this decision were not kept: see --details-per-s",
    ]
    found = await as_json(one_redis_server, "explain", "r1")
    assert (found["candidates"], found["trust"]) == ([], "exact")
    assert not {"blocks", "seen"} & found.keys()


async def test_explain_lists_the_cheapest_candidate_first_with_the_blocks_of_all_its_tiers(
    one_redis_server, redis
):
    columns = {name: np.zeros(3) for name in ROWS}
    columns["overlap_device"] += [1, 3, 2]
    columns["overlap_host"] += [2, 2, 0]
    columns["overlap_disk"] += [0, 1, 0]
    columns["max_requests"] += 100
    columns["prefill_s_per_token"] += 0.001
    seen = ChoiceInputs(["w0:0", "w1:0", "w2:0"], 4, Candidates(**columns), [True] * 3)
    await keep(redis, decided("r1", seen))
    candidates = (await as_json(one_redis_server, "explain", "r1"))["candidates"]
    assert [(c["worker"], c["overlap_blocks"]) for c in candidates] == [
        ("w1:0", 6),
        ("w0:0", 3),
        ("w2:0", 2),
    ]


def test_terms_that_do_not_follow_from_the_candidates_count_as_they_were_recorded():
    columns = {name: np.zeros(2) for name in ROWS}
    columns["prefill_s_per_token"] += 0.001
    columns["max_requests"] += 100
    columns["overlap_device"] += [10, 9]
    seen = ChoiceInputs(["w0:0", "w1:0"], 4, Candidates(**columns), [True] * 2)
    one = decided("r1", seen)
    cheapest = explanation(one)["candidates"][0]
    assert cheapest["worker"] == "w0:0"
    seen.others["late_s"] = np.array([50.0, 0.0])
    cheapest = explanation(one)["candidates"][0]
    assert (cheapest["worker"], cheapest["late_s"]) == ("w1:0", 0.0)
