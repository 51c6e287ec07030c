"""A browser, and a cluster under load that its pages look at."""

from __future__ import annotations

import os
import random
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.local.cluster import Cluster
from tests.redis_servers import default_kind, require_binary, require_redis

AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text()
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
SCREENSHOTS = Path(os.environ.get("KVROUTE_SCREENSHOTS", "out/console"))
HOSTILE = "<img/src=x/onerror=document.title='owned'>"
NUM_WORKERS = 4
CLIENTS = 2
SESSIONS = 24
NO_ANSWER = "Failed to load resource"
"""How Chromium reports that a poll failed; the page shows that, and asks again."""


# Other tests may keep all cores busy.
expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def browser():
    binary = require_binary("chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=binary, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def cluster():
    """Four workers and two replicas behind HAProxy, which serve chats until the last test ends."""
    require_binary("haproxy")
    require_redis(default_kind())
    with Cluster(
        num_workers=NUM_WORKERS,
        num_replicas=2,
        haproxy=True,
        router=RouterSettings(
            reservation_ttl_s=5.0, log_level="error", details_per_s=1000, drain_s=2.0
        ),
        worker=WorkerSettings(
            speedup=2.0,
            kv_pool_tokens=16_384,
            host_pool_tokens=8_192,
            drain_s=2.0,
            lease_ttl_s=1.0,
            model_name=f"{HOSTILE},70b",
            log_level="error",
        ),
    ) as started:
        yield started


class Load:
    """Chats of sessions, some dearer to their users than others.

    names: of the model, and of the tenants. pause_s: of each client between two chats.
    """

    def __init__(self, cluster, *names, clients=CLIENTS, sessions=SESSIONS, pause_s=0.0):
        self._model, *self._tenants = names or (HOSTILE, HOSTILE)
        self._sessions = sessions
        self._pause_s = pause_s
        self._client = httpx.Client(base_url=cluster.balancer_url, timeout=10.0)
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, client):
        rng = random.Random(client)
        while not self._stopping.wait(self._pause_s):
            # While a test has stopped Redis or killed a replica, some fail.
            with suppress(httpx.HTTPError):
                self.send(int(self._sessions * rng.random() ** 2), rng.randrange(8))

    def send(self, session, turn):
        words = f"session {session} " * 200 + "".join(f"turn {i} " * 40 for i in range(turn))
        self._client.post(
            "/v1/chat/completions",
            json={
                "model": self._model,
                "messages": [{"role": "user", "content": words}],
                "max_tokens": 8,
                "stream": True,
            },
            headers={
                "x-tenant-id": self._tenants[session % len(self._tenants)],
                "x-request-id": f"{self._tenants[0]}-{random.getrandbits(32):08x}",
            },
        )

    def stop(self):
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._client.close()


@pytest.fixture
def load(cluster):
    # Without pauses, it takes as much CPU as the browser.
    started = Load(cluster, pause_s=0.3)
    yield started
    started.stop()


@dataclass
class Watched:
    """A page, and what it should not have done."""

    page: Page
    base: str
    problems: list[str] = field(default_factory=list)

    def open(self, view, **until):
        """Go to a view and wait until it shows data."""
        self.page.goto(f"{self.base}/console/#/{view}")
        self.page.wait_for_selector("main section", **until)
        return self.page

    def serious(self):
        """What axe finds that keeps somebody from using the page."""
        self.page.evaluate(AXE)
        found = self.page.evaluate("axe.run({resultTypes: ['violations']})")
        return [
            f"{v['id']}: {v['nodes'][0]['html']}"
            for v in found["violations"]
            if v["impact"] in ("serious", "critical")
        ]


@pytest.fixture
def watch(browser):
    """Opens watched pages; at the end of `with`, a page must have done nothing wrong."""

    @contextmanager
    def watched(base, *, failures=False, **options):
        """failures: answers may fail. options: of the browser's context."""
        context = browser.new_context(**options)
        page = context.new_page()
        page.set_default_timeout(60_000)
        seen = Watched(page, base)
        page.on("pageerror", lambda error: seen.problems.append(str(error)))
        page.on("console", lambda said: note(said.type, said.text))
        page.on("request", lambda sent: foreign(sent.url))

        def note(kind, text):
            if kind in ("error", "warning") and not (failures and text.startswith(NO_ANSWER)):
                seen.problems.append(text)

        def foreign(url):
            own = (f"{base}/console/", f"{base}/tokenize", f"{base}/v1/route", "data:")
            if not url.startswith(own):
                seen.problems.append(url)

        yield seen
        # A page that still polls would ask past its routes once they are gone.
        page.goto("about:blank")
        # Else a route that asks the server would be fulfilled after the end.
        page.unroute_all(behavior="ignoreErrors")
        context.close()
        assert seen.problems == []

    return watched
