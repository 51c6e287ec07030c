"""The redis-cli commands in docs/redis.md answer the questions above them."""

import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from app.core.types import SequenceHash, Tier
from app.policy.locality import Locality
from app.state import decisions, models, planner
from tests.lua.conftest import LONG_MS, A, B, C, ticket
from tests.redis_servers import require_binary
from tests.state.test_decisions import record

TEXT = (Path(__file__).parents[2] / "docs" / "redis.md").read_text()
SECTION = TEXT.split("## Questions")[1]
PRELUDE, *BLOCKS = re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL)
QUESTIONS = re.findall(r"^(\w[^\n]*\?)\n\n```sh", SECTION, re.MULTILINE)
ANSWER_OF = dict(zip(QUESTIONS, BLOCKS, strict=True))
BLOCK = SequenceHash(0xF7F7_0123_4567_89AB)


@pytest.fixture
async def filled(space):
    """w1 is stale, w2 is dead and half swept, w3 holds blocks and has two requests."""
    require_binary("redis-cli")
    stale = await space.worker("w1", ttl_ms=1)
    dead = await space.worker("w2", bucket_bits=4)
    await space.hold(dead, [A])
    inc = await space.worker("w3")
    await space.hold(inc, [BLOCK, B, C])
    await space.reserve(inc, "req-7", tokens=100, us=5000, blocks=7)
    await space.reserve(inc, "req-8", ttl_ms=2 * LONG_MS, tokens=300, us=7000, blocks=9)
    await space.prefill_complete("req-7")
    await space.redis.xadd(space.keys["metrics"], {"worker": "w3:0", "incarnation": str(inc)})
    await space.until_lease_lapses(stale)
    await space.retire("w2", dead)
    await space.sweep(max_buckets=3)
    return space


def answer(space, question):
    """The lines that the commands below the question print."""
    prelude = PRELUDE.replace("{default'", "{test'")
    assert "{test'" in prelude
    pool = space.redis.connection_pool.connection_kwargs
    url = f"redis://{pool['host']}:{pool['port']}/0"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", prelude + ANSWER_OF[question]],
        env={"REDIS_URL": url, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_there_are_at_least_ten_questions():
    assert len(QUESTIONS) >= 10


async def test_live_and_stale_workers_and_their_loads(filled):
    [alive] = answer(filled, "Who is alive, by name and incarnation, and until when?")
    assert re.fullmatch(r"w3:0 3 \d{13}", alive)
    [stale] = answer(filled, "Which worker is stale?")
    assert '"worker":"w1:0"' in stale
    loads = answer(
        filled, "What is each worker's load, by name and incarnation, in the order of the table?"
    )
    assert [load for load in loads if load.startswith("w3:0 3 300 7000 ")]


async def test_requests_and_their_reservations(filled):
    reserved = answer(filled, "What is reserved on w3?")
    assert reserved[0] == "req-7"
    assert reserved[1].startswith("100 5000 7 d")
    assert answer(filled, "Which of its requests still prefill, the one at work first?") == [
        "req-8"
    ]
    [worker] = answer(filled, "Where is a request?")
    assert '"worker":"w3:0"' in worker
    ends = answer(filled, "Which reservations end next, if nobody releases them?")
    assert ends[::2] == ["req-7", "req-8"]


async def test_waiting_tenants(filled):
    await filled.wait("x", ticket("low:batch", "x", 1), ticket("high:acme", "x", 2, weight=16.0))
    question = "Which tenants wait for a worker, with what priority, the next in turn first?"
    assert answer(filled, question) == ["high:acme", "low:batch"]


async def test_blocks_and_sweeps(filled):
    assert answer(filled, "Who holds a block?") == ["3d"]
    question = "How many blocks does the index hold, and how much memory does Redis use?"
    blocks, memory = answer(filled, question)
    assert blocks == "4"
    assert int(memory.strip().split(":")[1]) > 100_000
    [sweep] = [question for question in QUESTIONS if "swept" in question]
    assert answer(filled, sweep) == ["2", "3"]
    assert "w3:0" in answer(filled, "What did the workers last measure?")


async def test_blocks_of_one_worker(filled):
    other = await filled.worker("w33")
    await filled.hold(other, [BLOCK, B], Tier.HOST)
    assert answer(filled, "How many blocks does w3 hold?") == ["3"]


async def test_decisions_and_why_locality_was_lost(filled):
    for name, locality in (("r1", Locality.LOAD), ("r2", Locality.KEPT), ("r3", Locality.LOAD)):
        asked = msgspec.structs.replace(record(name, [A, B]), locality=locality)
        await filled.do(decisions.record(filled.keys, asked, kept=10))
    last = answer(filled, "What was decided last, and where was most of the prompt?")
    assert last == [
        '"worker":"w1:0"',
        '"locality":"load"',
        '"overlap":{"device":3,"host":2,"disk":1}',
        '"best":["w2:1",9]',
    ]
    [why] = [question for question in QUESTIONS if "longest overlap" in question]
    assert [line.split() for line in answer(filled, why)] == [
        ["1", '"locality":"kept"'],
        ["2", '"locality":"load"'],
    ]


async def test_models_and_the_planner_that_leads(filled):
    await filled.do(models.announce("test", ["qwen"]))
    served = answer(filled, "Which models are served, and in which namespaces?")
    assert served[0] == "qwen"
    assert served[1].startswith("test ")
    token = (await filled.do(planner.lead(filled.keys, "host-1", LONG_MS))).token
    shown = {"desired": 3, "size": 2, "reason": "slo_missed", "victim": ""}
    await filled.do(planner.propose(filled.keys, token, {}, None, shown))
    holder, until_ms, *rest = answer(
        filled, "Which planner leads, until when, and what did it propose last?"
    )
    assert (holder, rest) == ("host-1", ["2", "3", "slo_missed", ""])
    assert until_ms.isdecimal()


async def test_what_happened_last(filled):
    told = answer(filled, "What happened last?")
    assert told[1:7] == ["kind", "left", "subject", "w2:0", "text", ""]
