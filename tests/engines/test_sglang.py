"""SGLang's own radix cache and publisher, and an agent beside them: see `make test-sglang`."""

import os
import random
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from app.local.redis_server import free_port
from tests.e2e.engines import agent
from tests.edge.conftest import started_replica
from tests.eventually import eventually

VENV = Path(os.environ.get("KVROUTE_TEST_SGLANG", Path(__file__).parents[2] / ".venv-sglang"))
"""The virtual environment that install_sglang.sh makes."""
PAGE, PAGES = 16, 120
WAIT_S = 300.0
"""The machine may be busy."""

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


@contextmanager
def sglang(http_port, events_port, replay_port, page=PAGE):
    if not VENV.exists():
        pytest.fail(f"there is no {VENV}: make test-sglang installs SGLang there")
    script = Path(__file__).with_name("sglang_engine.py")
    numbers = map(str, (http_port, events_port, replay_port, page, PAGES))
    with subprocess.Popen(
        [VENV / "bin" / "python", script, *numbers],
        env=os.environ | {"TORCH_EXTENSIONS_DIR": str(VENV / "torch_extensions")},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert "serving" in process.stdout.readline()
            yield process
        finally:
            process.kill()


class SglangPrompts:
    """Prompts that share prefixes, and salts, seeded."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._told = []

    @property
    def last(self):
        return next(told for told in reversed(self._told) if len(told[0]) >= PAGE)

    def next(self):
        choice = self._random
        begun, salt = choice.choice(self._told) if self._told else ([], None)
        kept = begun[: choice.randrange(len(begun) + 1)] if choice.random() < 0.8 else []
        if not kept:
            salt = choice.choice([None, None, "red"])
        more = [choice.randrange(1, 50_000) for _ in range(choice.randrange(1, 120))]
        prompt = [*kept, *more][:600]
        self._told = [*self._told[-30:], (prompt, salt)]
        return prompt, salt


async def test_overlap_is_what_sglang_finds_after_evictions_resets_and_kills(
    one_redis_server, tmp_path
):
    ports = [free_port() for _ in range(3)]
    url, prompts = f"http://127.0.0.1:{ports[0]}", SglangPrompts(1)
    async with (
        started_replica(one_redis_server.url) as router,
        httpx.AsyncClient(base_url=url, timeout=300) as engine,
    ):

        async def serving():
            listed = (await router.get("/v1/workers")).json()
            return [worker["worker_id"] for worker in listed["workers"]]

        async def overlap(tokens, salt):
            """None: on a busy machine the worker may be away for a moment."""
            asked = {"token_ids": tokens, "reserve": False, "explain": True}
            asked |= {"cache_namespace": salt} if salt else {}
            answer = (await router.post("/v1/route", json=asked)).json()
            found = answer.get("candidates", ())
            return sum(found[0]["overlap_blocks"].values()) if found else None

        async def check(number):
            for _ in range(number):
                tokens, salt = prompts.next()

                async def look(tokens=tokens, salt=salt):
                    return await overlap(tokens, salt)

                found = await eventually(look, lambda seen: seen is not None, within_s=WAIT_S)
                stated = min(found or 0, (len(tokens) - 1) // PAGE)
                answer = await engine.post("/ask", json={"tokens": tokens, "salt": salt})
                assert answer.json()["cached"] == stated * PAGE
                pages = len(tokens) // PAGE
                await eventually(look, lambda seen, pages=pages: seen == pages, within_s=WAIT_S)

        with sglang(*ports):
            for number in (signal.SIGKILL, signal.SIGTERM):
                with agent(url, one_redis_server.url, tmp_path) as beside:
                    await eventually(serving, lambda seen: seen == ["e"], within_s=WAIT_S)
                    await check(60)
                    await engine.post("/reset")
                    last, salt = prompts.last
                    await eventually(
                        lambda last=last, salt=salt: overlap(last, salt),
                        lambda seen: seen == 0,
                        within_s=WAIT_S,
                    )
                    await check(60)
                    beside.end(number)
                # One that is killed leaves a well engine in service; one that ends, does not.
                left = ["e"] if number == signal.SIGKILL else []
                await eventually(serving, lambda seen, left=left: seen == left, within_s=WAIT_S)


async def test_pages_of_one_token_make_it_approximate(one_redis_server, tmp_path):
    ports = [free_port() for _ in range(3)]
    url, redis_url = f"http://127.0.0.1:{ports[0]}", one_redis_server.url
    with sglang(*ports, page=1), agent(url, redis_url, tmp_path):
        async with started_replica(redis_url) as router:

            async def workers():
                return list((await router.get("/v1/workers")).json()["workers"])

            [worker] = await eventually(workers, within_s=WAIT_S)
            assert worker["trust"] == "approximate"
            assert "--page-size 16" in worker["trust_cause"]
            assert worker["block_size"] == 16  # of the index, in which nothing of it is
