"""Five sick clusters, and what the first page of the console says of each to whoever is on call:
how many fail, which engine, in what words, since when, which model, what to do.

KVROUTE_PICTURES=docs/images writes their pictures there (`make pictures`).
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import AsyncExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import httpx
import pytest
from PIL import Image
from playwright.sync_api import expect

from app.core.settings.agent import EngineAgentSettings
from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.local.cluster import Cluster
from tests.fakes.engine import fake_engine
from tests.fakes.faults import Faults
from tests.redis_servers import default_kind, require_binary, require_redis, stopped

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FOLDER = Path(os.environ.get("KVROUTE_PICTURES", "out/console"))
SIZES = {"": {"width": 1360, "height": 760}, "-phone": {"width": 360, "height": 740}}
MAX_BYTES = 150_000
NUM_COLOURS = 200
MODEL = "llama-70b"
CLIENTS = 6
NUM_ENGINES = 3
LEAVES_S = 1.5
"""So long a client waits for something to come."""
OUT_OF_MEMORY = '{"error": {"message": "CUDA out of memory. Tried to allocate 2.00 GiB."}}'
LOST = '{"error": {"message": "NCCL error: remote process exited or there was a network error"}}'
WITHIN_MS = 90_000
SHOWN_S = 12
"""So long it is sick before the picture is taken, which shows rates of ten seconds."""


@dataclass(frozen=True, slots=True)
class Sick:
    """engines: so many of them have the faults. tile: one that is red. says: what the page says."""

    faults: Faults
    engines: int
    tile: str
    says: tuple[str, ...]
    model: str = MODEL
    is_without_redis: bool = False


CLUSTERS = {
    "errors": Sick(
        Faults(status=500, body=OUT_OF_MEMORY),
        NUM_ENGINES,
        "failed",
        (f"of the requests for {MODEL} fail", "CUDA out of memory", "drain or restart its engine"),
    ),
    "hangs": Sick(
        Faults(how="hang"),
        NUM_ENGINES,
        "left waiting",
        (f"clients of {MODEL} leave before their first token", "its client left", "hang"),
    ),
    "one-fails": Sick(
        Faults(status=500, body=LOST),
        1,
        "",
        ("fails", "NCCL error", "drain or restart its engine"),
    ),
    "renamed": Sick(
        Faults(),
        0,
        "refused",
        ("are refused as wrong", "Was a model renamed", "does not exist"),
        model="llama-3-70b",
    ),
    "redis-away": Sick(
        Faults(), 0, "Redis", ("Redis does not answer", "load alone"), is_without_redis=True
    ),
}


@contextmanager
def engines():
    """Well ones, which run in a thread of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    opened = AsyncExitStack()

    async def start():
        options = {"models": [MODEL], "prefill_s": 0.05, "token_s": 0.01}
        return [
            await opened.enter_async_context(fake_engine(**options)) for _ in range(NUM_ENGINES)
        ]

    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    finally:
        asyncio.run_coroutine_threadsafe(opened.aclose(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def clients(url, model):
    """Some that ask, and leave where nothing comes for LEAVES_S."""
    stopping = threading.Event()

    def run(number):
        with httpx.Client(base_url=url, timeout=LEAVES_S) as http:
            turn = 0
            while not stopping.wait(0.2):
                turn += 1
                prompt = [number] * 200 + [turn] * 40
                asked = {"model": model, "prompt": prompt, "stream": True}
                with suppress(httpx.HTTPError):
                    http.post("/v1/completions", json=asked)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_first_page_says_what_is_wrong_with_a_sick_cluster(name, watch):
    require_binary("haproxy")
    require_redis(default_kind())
    sick = CLUSTERS[name]
    with (
        engines() as all_engines,
        Cluster(
            num_workers=0,
            num_replicas=1,
            engines=[engine.url for engine in all_engines],
            agent=EngineAgentSettings(log_level="error", drain_s=2.0),
            router=RouterSettings(log_level="error", drain_s=2.0),
            worker=WorkerSettings(drain_s=2.0),
        ) as cluster,
        watch(cluster.balancer_url, failures=True, viewport=SIZES[""]) as seen,
    ):
        with clients(cluster.balancer_url, MODEL):
            page = seen.open("overview")
            expect(page.locator("[data-tile=workers]")).to_have_text(str(NUM_ENGINES))
            expect(page.locator("tbody", has_text=MODEL).first).to_be_visible(timeout=WITHIN_MS)
        for engine in all_engines[: sick.engines]:
            engine.faults = sick.faults
        assert cluster.redis is not None
        redis = stopped(cluster.redis.pid) if sick.is_without_redis else nullcontext()
        with clients(cluster.balancer_url, sick.model), redis:
            _check(page, sick)
            page.wait_for_timeout(SHOWN_S * 1000)
            _photograph(page, name)


def _check(page, sick):
    main = page.locator("main")
    for text in sick.says:
        expect(main).to_contain_text(text, timeout=WITHIN_MS)
    if sick.tile:
        tile = page.locator(f'[data-tile="{sick.tile}"]')
        expect(tile).to_have_class("bad", timeout=WITHIN_MS)
    if not sick.is_without_redis:
        expect(page.get_by_role("region", name="Last errors")).to_contain_text("ago")


def _photograph(page, name):
    for suffix, size in SIZES.items():
        # On a phone, one is enough for the documents.
        folder = FOLDER if not suffix or name == "errors" else Path("out/console")
        folder.mkdir(parents=True, exist_ok=True)
        page.set_viewport_size(size)
        page.evaluate("scrollTo(0, 0)")
        page.wait_for_timeout(500)
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        path = folder / f"sick-{name}{suffix}.png"
        taken = Image.open(BytesIO(page.screenshot()))
        taken.convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(
            path, optimize=True
        )
        assert path.stat().st_size < MAX_BYTES
