"""Leases on KV that end, at two real vLLM: see `make test-vllm-pd`."""

import asyncio
import os
import random
import re
import signal
import subprocess
from contextlib import contextmanager

import httpx
import pytest

from app.door.transfer.kv_lease import KvLeases
from tests.door.conftest import until_serving
from tests.door.test_failures import nothing_reserved
from tests.e2e.engines import Process
from tests.engines.vllm_pair import joined, marks, two_servers
from tests.engines.vllm_server import MAX_SEQS, MODEL
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE
from tests.ops.test_doctor import examined

LEASE_S = 20.0
"""Longer than a transfer takes on a busy machine, shorter than a wait for its end may be."""

pytestmark = [pytest.mark.vllm_pd, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with two_servers(tmp_path_factory.mktemp("pd"), LEASE_S) as started:
        yield started


@pytest.fixture
async def pair(servers, one_redis_server, tmp_path):
    async with joined(servers, one_redis_server.url, tmp_path) as pair:
        yield pair


async def test_a_client_gone_between_the_steps_leaves_nothing_after_the_lease(pair, redis):
    rng = random.Random(9)
    for delay_s in (0.1, 0.3, 0.6, 1.0):
        prompt = [rng.randrange(5, 400) for _ in range(1500)]
        # Long enough that no machine answers within the longest delay.
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 500, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            await pair.split.post("/v1/completions", json=body, timeout=delay_s)
    await nothing_reserved(redis, within_s=LEASE_S + 20)


def engine_core(server):
    """The processes that compute, beside the one that answers."""
    listed = subprocess.run(
        ["ps", "-eo", "pid,pgid,args", "--no-headers"], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    found = [
        int(pid)
        for pid, group, name in rows
        if int(group) == server.process_group and name.startswith("VLLM::")
    ]
    assert found
    return found


@contextmanager
def frozen(server):
    processes = engine_core(server)
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)


async def overwrite(pair, rng):
    for _ in range(30):
        other = [rng.randrange(5, 400) for _ in range(1200)]
        await pair.text(pair.p.url, other, max_tokens=1)


@pytest.mark.parametrize("guarded", [True, False])
async def test_a_target_that_fetched_after_the_lease_answers_nobody(
    pair, redis, monkeypatch, guarded
):
    """Stops the engine until it has dropped its KV. Control: without the guard the text is
    wrong."""
    if not guarded:
        monkeypatch.setattr(KvLeases, "confirm", passes)
    rng = random.Random(10 + guarded)
    prompt = [rng.randrange(5, 400) for _ in range(800)]
    right = await pair.text(pair.p.url, prompt)
    await pair.text(pair.d.url, prompt[:64])
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    with frozen(pair.d):
        asking = asyncio.create_task(
            pair.split.post("/v1/completions", json=body | {"ignore_eos": True})
        )
        await asyncio.sleep(LEASE_S + 8)
        await overwrite(pair, rng)
    texts = []
    for answer in (
        await asking,
        await pair.split.post("/v1/completions", json=body | {"ignore_eos": True}),
        await pair.priced.post("/v1/completions", json=body | {"ignore_eos": True}),
    ):
        # Nobody else decodes; then it is said that nobody is there.
        assert answer.status_code in (200, 502, 503), answer.text
        texts += [answer.json()["choices"][0]["text"]] if answer.status_code == 200 else []
    if not guarded:
        assert set(texts) - {right}
        await pair.direct.post(f"{pair.d.url}/reset_prefix_cache")
        return
    assert set(texts) <= {right}

    # Its engine is asked to drop what it holds, which it does; then it is back. What it was sent
    # before may still be let go of late, and then it drops all once more.
    async def is_back():
        await until_serving(pair.split, 2)
        answer = await pair.split.post("/v1/completions", json=body | {"ignore_eos": True})
        if answer.status_code != 200:
            return False
        assert answer.json()["choices"][0]["text"] == right
        return True

    await eventually(is_back)
    assert await marks(redis) == []
    await nothing_reserved(redis, within_s=LEASE_S + 20)


async def passes(*_):
    pass


FLAG_S = 6 * LEASE_S
ASKED = 60


@pytest.fixture
async def misled(servers, one_redis_server, tmp_path):
    flag = f"--kv-lease-s={FLAG_S:g}"
    async with joined(servers, one_redis_server.url, tmp_path, flag) as pair:
        yield pair


async def right_texts(pair, seed):
    rng = random.Random(seed)
    first = [rng.randrange(5, 400) for _ in range(800)]
    prompts = [first]
    for _ in range(ASKED - 1):
        tail = [rng.randrange(5, 400) for _ in range(rng.randrange(20, 60))]
        prompts.append(first[: rng.randrange(32, 800)] + tail)
    return {tuple(prompt): await pair.text(pair.p.url, prompt) for prompt in prompts}


async def text_of(door, prompt):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    while True:
        answer = await door.post("/v1/completions", json=body | {"ignore_eos": True})
        if answer.status_code == 200:
            return answer.json()["choices"][0]["text"]
        assert answer.status_code in (502, 503), answer.text
        await asyncio.sleep(0.5)


async def test_no_replica_gives_a_wrong_text_while_the_one_that_knows_is_stopped(
    pair, one_redis_server
):
    rights = await right_texts(pair, 21)
    first, *others = rights
    await pair.text(pair.d.url, list(first[:64]))
    flags = (f"--redis-url={one_redis_server.url}", f"--namespace={NAMESPACE}", "--port=0")
    with Process("router", *flags, "--policy=least_loaded").ending() as process:
        async with httpx.AsyncClient(base_url=process.url, timeout=600) as door:
            await until_serving(door, 2)
            with frozen(pair.d):
                asking = asyncio.create_task(text_of(door, first))
                await asyncio.sleep(4)
                process.popen.send_signal(signal.SIGSTOP)
                await asyncio.sleep(LEASE_S + 4)
                await overwrite(pair, random.Random(22))
                doors = [pair.split, pair.priced] * ASKED
                asked = [asyncio.create_task(text_of(*o)) for o in zip(doors, others, strict=False)]
                await asyncio.sleep(2)
            texts = await asyncio.gather(*asked)
            process.popen.send_signal(signal.SIGCONT)
            wrong = [p for p, text in zip(others, texts, strict=True) if text != rights[p]]
            assert wrong == []
            assert await asking == rights[first]


async def test_what_an_operator_says_of_a_lease_is_not_believed(misled, one_redis_server):
    pair, rights = misled, await right_texts(misled, 23)
    first, *others = rights
    await pair.text(pair.d.url, list(first[:64]))
    with frozen(pair.d):
        asked = [asyncio.create_task(text_of(pair.split, first))]
        await asyncio.sleep(LEASE_S + 8)
        await overwrite(pair, random.Random(24))
        doors = [pair.split, pair.priced] * ASKED
        asked += [asyncio.create_task(text_of(*o)) for o in zip(doors, others, strict=False)]
        await asyncio.sleep(2)
    texts = await asyncio.gather(*asked)
    assert [p for p, text in zip(rights, texts, strict=True) if text != rights[p]] == []
    found = await asyncio.to_thread(examined, one_redis_server.url)
    assert f"--kv-lease-s is {FLAG_S:g}" in found["findings"]["found"]


async def test_a_whole_answer_may_take_longer_than_the_lease(pair, redis):
    rng = random.Random(12)
    prompt = [rng.randrange(5, 400) for _ in range(300)]
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True}
    before = sum((await pair.by_source()).values())

    async def has_fetched():
        return sum((await pair.by_source()).values()) >= before + len(prompt)

    asking = asyncio.create_task(
        pair.split.post("/v1/completions", json=body | {"max_tokens": 1000})
    )
    await eventually(has_fetched, within_s=60)
    with frozen(pair.d):
        await asyncio.sleep(LEASE_S)
    answer = await asking
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvroute-source"] == "p:0"
    assert answer.headers["x-kvroute-worker"] == "d:0"
    text = answer.json()["choices"][0]["text"]
    assert text == await pair.text(pair.p.url, prompt, max_tokens=1000)
    assert await marks(redis) == []


async def test_a_target_may_queue_longer_than_the_lease(pair, redis):
    """The holder prolongs the lease meanwhile. If the machine is too busy for that, the answer goes
    to nobody."""
    rng, let_go = random.Random(13), "Releasing expired KV blocks"
    prompt = [rng.randrange(5, 400) for _ in range(300)]
    right = await pair.text(pair.p.url, prompt)
    body = {"model": MODEL, "max_tokens": 4000, "ignore_eos": True}
    others = [
        asyncio.create_task(
            pair.direct.post(f"{pair.d.url}/v1/completions", json=body | {"prompt": [5 + number]})
        )
        for number in range(MAX_SEQS)
    ]

    async def requests(state):
        text = (await pair.direct.get(f"{pair.d.url}/metrics")).text
        found = re.search(rf"num_requests_{state}\{{.*\}} (\d+)", text)
        return int(found[1]) if found else 0

    await eventually(lambda: requests("running"), lambda number: number == MAX_SEQS)
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    asking = asyncio.create_task(
        pair.split.post("/v1/completions", json=asked | {"ignore_eos": True})
    )
    await eventually(lambda: requests("waiting"), lambda number: number == 1)
    before = pair.p.num_logged(let_go)
    await asyncio.sleep(LEASE_S + 2)
    assert await requests("waiting") == 1, "else it proves nothing"
    for one in others:
        one.cancel()
    answer = await asking
    if pair.p.num_logged(let_go) > before:
        assert answer.status_code == 502
        return
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvroute-source"] == "p:0"
    assert answer.json()["choices"][0]["text"] == right
    assert await marks(redis) == []
