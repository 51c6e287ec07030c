"""The console as a person sees it: in Chromium, over a cluster of real processes under load."""

import json
import os
import re
import subprocess
import sys
import time
from urllib.parse import quote

import httpx
import pytest
from playwright.sync_api import expect

from app.local.child import start_child
from app.local.redis_server import free_port
from tests.console.conftest import HOSTILE, NUM_WORKERS, SCREENSHOTS, Load
from tests.e2e.conftest import listens
from tests.e2e.engines import Process
from tests.redis_servers import stopped

VIEWS = ("decisions", "prefix", "waiting", "events", "workers", "reuse", "overview")
HEALTH = ".health"
LIVE = re.compile(r"^\d\.\d s old$")
PHONE = {"width": 360, "height": 740}


def inspected(cluster, *command):
    """What `kvroute inspect … --json` says."""
    environment = os.environ | {"REDIS_URL": cluster.redis_url}
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", "inspect", *command, "--json"],
        env=environment,
        capture_output=True,
        check=True,
        timeout=30,
    )
    return json.loads(done.stdout)


def cell(page, worker, column):
    """The text of a worker's cell."""
    heads = page.locator("table[aria-rowcount] thead th").all_inner_texts()
    at = next(i for i, head in enumerate(heads) if head.startswith(column))
    row = page.locator("tbody tr", has=page.get_by_role("link", name=worker, exact=True))
    return row.locator("td").nth(at).inner_text()


def explained(cluster):
    """The id of a request whose candidates are kept."""
    table = httpx.get(f"{cluster.balancer_url}/console/api/decisions").json()
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    return next(row["request_id"] for row in rows if row["explained"])


@pytest.mark.parametrize(
    ("scheme", "viewport"),
    [pytest.param("light", None, marks=pytest.mark.slow), ("dark", PHONE)],
)
def test_every_view_is_shown_whole_to_everybody(cluster, load, watch, scheme, viewport):
    size = viewport or {"width": 1360, "height": 850}
    with watch(cluster.balancer_url, color_scheme=scheme, viewport=size) as seen:
        for view in VIEWS:
            page = seen.open(view)
            expect(page.locator(HEALTH)).to_have_text(LIVE)
            if view in ("reuse", "overview"):
                expect(page.locator(".step").first).to_be_visible()
            photograph(seen, view, scheme)
        photograph(seen, "worker", scheme, "workers/w1:0")
        photograph(seen, "explanation", scheme, f"decisions/{quote(explained(cluster), safe='')}")


def photograph(seen, name, scheme, view=""):
    """Save a picture of a view, which must be as wide as the screen and have no serious fault."""
    page = seen.open(view) if view else seen.page
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    assert seen.serious() == []
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}-{scheme}.png")


def test_numbers_are_those_of_kvroute_inspect(cluster, watch):
    load = Load(cluster)
    for number in range(8):
        load.send(number, 1)
    load.stop()
    found = inspected(cluster, "summary")["summary"]["workers"]
    with watch(cluster.balancer_url) as seen:
        page = seen.open("workers")
        expect(page.get_by_role("heading", name=f"{NUM_WORKERS} workers")).to_be_visible()
        for worker in found:
            key = worker["info"]["key"]
            assert cell(page, key, "requests") == "0"
        page = seen.open("waiting")
        expect(page.get_by_role("heading", name="0 requests wait")).to_be_visible()
        assert inspected(cluster, "waiting") == []


def test_hostile_names_stay_text(cluster, load, watch):
    with watch(cluster.balancer_url) as seen:
        page = seen.open("decisions")
        request = page.locator("tbody a.id", has_text=HOSTILE).first
        request.click()
        expect(page.get_by_role("heading", name=f"Why {HOSTILE}")).to_be_visible()
        page = seen.open("workers/w0:0")
        expect(page.get_by_text(HOSTILE, exact=True).first).to_be_visible()
        expect(page.locator("main img")).to_have_count(0)
        expect(page).not_to_have_title("owned")


def test_it_works_below_a_prefix(cluster, load, watch):
    base = f"{cluster.balancer_url}/some/prefix"

    def stripped(route):
        route.fulfill(response=route.fetch(url=route.request.url.replace("/some/prefix", "")))

    with watch(base) as seen:
        seen.page.route("**/some/prefix/**", stripped)
        page = seen.open("overview")
        expect(page.locator("[data-tile=workers]")).to_have_text(str(NUM_WORKERS))


KEEP_PLOTS = """
window.plots = [];
let kept;
Object.defineProperty(window, "uPlot", {
  get: () => kept,
  set: (plot) => (kept = function (...given) { return plots[plots.push(new plot(...given)) - 1]; }),
});
"""
SPANS = "plots.map(({scales: {x}}) => x.max - x.min)"


def test_charts_have_the_time_that_they_name(cluster, load, watch):
    with watch(cluster.balancer_url) as seen:
        seen.page.add_init_script(KEEP_PLOTS)
        for view, named_s in (("overview", 300), ("events", 3600), ("workers/w1:0", 3600)):
            seen.page.goto("about:blank")
            page = seen.open(view)
            page.wait_for_selector(".chart canvas")
            page.wait_for_function(f"{SPANS}.every((span) => span >= {named_s})")


@pytest.mark.slow
def test_a_fresh_clusters_page_says_how_to_begin(cluster, watch):
    flags = [f"--redis-url={cluster.redis_url}", "--namespace=fresh"]
    router = Process("router", "--port=0", *flags)
    try:
        with watch(router.url, failures=True) as seen:
            page = seen.open("overview")
            expect(page.get_by_role("heading", name="No worker yet")).to_be_visible()
            expect(page.locator("code").first).to_contain_text("kvroute agent --namespace fresh")
            worker = Process("worker", "--port=0", "--model-name=it's new", *flags)
            try:
                expect(page.get_by_role("heading", name="No request yet")).to_be_visible()
                line = page.locator("code").inner_text()
                done = subprocess.run(
                    ["bash", "-c", f"{line} -sf"], capture_output=True, check=True, timeout=30
                )
                assert json.loads(done.stdout)["choices"]
                expect(page.get_by_role("heading", name="No request yet")).to_have_count(0)
            finally:
                worker.end()
    finally:
        router.end()


def test_workers_in_trouble_come_first(cluster, watch):
    table = httpx.get(f"{cluster.balancer_url}/console/api/workers").json()
    place = {name: at for at, name in enumerate(table["columns"])}
    rows = []
    for name, state, trouble in (("a", "serving", 3), ("b", "paused", 3e6), ("c", "tainted", 8e6)):
        row = list(table["rows"][0])
        for column, value in (("worker", f"{name}:0"), ("state", state), ("trouble", trouble)):
            row[place[column]] = value
        rows.append(row)
    with watch(cluster.balancer_url) as seen:
        seen.page.route("**/api/workers", lambda route: route.fulfill(json=table | {"rows": rows}))
        page = seen.open("workers")
        expect(page.locator("tbody a.id")).to_have_text(["c:0", "b:0", "a:0"])
        expect(page.locator("td .bad", has_text="tainted")).to_be_visible()


@pytest.fixture
def locked_url(cluster):
    """Of a replica that asks for a key."""
    url = f"http://127.0.0.1:{free_port()}"
    flags = ["--port", url.rpartition(":")[2], "--api-key", "sesame", "--log-level", "error"]
    environment = os.environ | {"REDIS_URL": cluster.redis_url}
    process = start_child([sys.executable, "-m", "app.cli", "router", *flags], env=environment)
    while not listens(url):
        assert process.poll() is None
        time.sleep(0.05)
    yield url
    process.terminate()
    process.wait(10)


def test_it_asks_for_a_key_and_keeps_it(locked_url, watch):
    with watch(locked_url, failures=True) as seen:
        page = seen.open("overview")
        page.get_by_label("Operator's key").fill("open")
        page.get_by_role("button", name="Open").click()
        expect(page.get_by_role("heading", name="asks for an operator's key")).to_be_visible()
        page.get_by_label("Operator's key").fill("sesame")
        page.get_by_role("button", name="Open").click()
        expect(page.locator("[data-tile=workers]")).to_have_text(str(NUM_WORKERS))
        expect(page.get_by_label("Operator's key")).to_have_count(0)
        page.reload()
        expect(page.locator("[data-tile=workers]")).to_have_text(str(NUM_WORKERS))


def test_it_is_used_by_keyboard(cluster, load, watch):
    with watch(cluster.balancer_url) as seen:
        page = seen.open("workers")
        queue = page.get_by_role("button", name="queue")
        queue.focus()
        page.keyboard.press("Enter")
        expect(page.locator("th[aria-sort=descending]")).to_have_text("queue")
        page.get_by_role("link", name="w2:0", exact=True).focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="w2:0")).to_be_visible()


def test_a_worker_drains_only_once_that_is_confirmed(cluster, watch):
    with watch(cluster.balancer_url) as seen:
        page = seen.open("workers/w3:0")
        page.get_by_role("button", name="Drain…").click()
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Drain…").click()
        page.get_by_role("dialog").get_by_role("button", name="Drain").click()
        expect(page.get_by_role("status")).to_have_text("It gets no more requests.")
        page.get_by_role("button", name="Undo drain…").click()
        page.get_by_role("dialog").get_by_role("button", name="Undo drain").click()
        expect(page.get_by_role("button", name="Drain…", exact=True)).to_be_visible()


def test_a_prompt_is_looked_up_without_a_reservation(cluster, load, watch):
    with watch(cluster.balancer_url, failures=True) as seen:
        page = seen.open("prefix")
        page.get_by_label("It is").select_option("token_ids")
        page.locator("textarea").fill(" ".join(str(i) for i in range(100)))
        page.get_by_role("button", name="Look up").click()
        expect(page.get_by_text("100 tokens, 7 blocks")).to_be_visible()
        expect(page.get_by_role("heading", name="Where it would go now")).to_be_visible()
        expect(page.locator("tbody tr")).to_have_count(NUM_WORKERS)
        page.locator("textarea").fill("1 2 many")
        page.get_by_role("button", name="Look up").click()
        expect(page.get_by_role("alert")).to_contain_text("token_ids")


CHATS = (
    '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]',
    '{"model": "MODEL", "messages": [{"role": "system", "content": "Be brief."}, '
    '{"role": "user", "content": "Hello"}]}',
    "system: Be brief.\nuser: Hello",
)


def test_a_chat_is_looked_up_as_json_and_as_text(cluster, load, watch):
    with watch(cluster.balancer_url, failures=True) as seen:
        page = seen.open("prefix")
        counts = set()
        for text in CHATS:
            page.get_by_label("Model").fill("" if "MODEL" in text else HOSTILE)
            page.locator("textarea").fill(text.replace("MODEL", HOSTILE))
            with page.expect_response("**/v1/route") as answer:
                page.get_by_role("button", name="Look up").click()
            counts.add(answer.value.json()["isl_tokens"])
            expect(page.get_by_role("heading", name="Where it would go now")).to_be_visible()
        assert len(counts) == 1
        page.locator("textarea").fill("Hello")
        with page.expect_response("**/v1/route") as answer:
            page.get_by_role("button", name="Look up").click()
        assert answer.value.json()["isl_tokens"] < min(counts)
        page.locator("textarea").fill('{"prompt": "Hello"}')
        page.get_by_role("button", name="Look up").click()
        expect(page.get_by_role("alert")).to_contain_text("messages")


def test_a_thousand_workers_are_a_few_rows_in_the_page(cluster, watch):
    table = httpx.get(f"{cluster.balancer_url}/console/api/workers").json()
    at = table["columns"].index("worker")
    table["rows"] = [
        [*table["rows"][0][:at], f"x{i}:0", *table["rows"][0][at + 1 :]] for i in range(1000)
    ]
    with watch(cluster.balancer_url) as seen:
        seen.page.route("**/api/workers", lambda route: route.fulfill(json=table))
        page = seen.open("workers")
        expect(page.get_by_role("heading", name="1,000 workers")).to_be_visible()
        assert page.locator("tbody tr").count() < 100
        page.get_by_role("region", name="Workers").evaluate("box => box.scrollTo(0, 1e6)")
        expect(page.get_by_role("link", name="x999:0")).to_be_visible()


def test_a_hidden_tab_asks_nothing(cluster, load, watch):
    with watch(cluster.balancer_url) as seen:
        page = seen.page
        page.add_init_script("Object.defineProperty(document, 'hidden', {get: () => window.gone})")
        page.clock.install()
        page.goto(f"{seen.base}/console/#/overview")
        page.wait_for_selector("[data-tile=workers]")
        turn(page, hidden=True)
        page.wait_for_load_state("networkidle")
        asked = []
        page.on("request", lambda sent: asked.append(sent.url))
        page.clock.run_for(60_000)
        expect(page.locator(HEALTH)).to_have_text("paused")
        assert asked == []
        with page.expect_request("**/api/overview"):
            turn(page, hidden=False)


def turn(page, *, hidden):
    page.evaluate(f"window.gone = {str(hidden).lower()}")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def test_it_says_how_old_its_data_is_while_redis_is_away(cluster, load, watch):
    assert cluster.redis is not None
    with watch(cluster.balancer_url, failures=True) as seen:
        page = seen.open("overview")
        with stopped(cluster.redis.pid):
            expect(page.locator(HEALTH)).to_contain_text("data", timeout=30_000)
            expect(page.locator("[data-tile=workers]")).to_have_text(str(NUM_WORKERS))
            expect(page.locator("[data-tile=Redis]")).to_have_text("away")
            expect(page.get_by_role("alert")).to_contain_text("Redis does not answer")
            expect(page.get_by_role("heading", name="What was wrong")).to_be_visible()
        expect(page.locator(HEALTH)).to_have_text(LIVE, timeout=30_000)
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.locator("[data-tile=Redis]")).not_to_have_text("away")


def test_a_page_that_asks_for_nothing_says_that_the_router_does_not_answer(cluster, watch):
    held = []
    with watch(cluster.balancer_url, failures=True) as seen:
        page = seen.open("prefix")
        expect(page.locator(HEALTH)).to_have_text(LIVE)
        page.route("**/api/**", lambda route: held.append(route))
        expect(page.locator(f"{HEALTH}.late")).to_be_visible(timeout=30_000)
        expect(page.get_by_role("alert")).to_contain_text("The router does not answer")
        page.unroute_all(behavior="ignoreErrors")
        page.route("**/api/**", lambda route: route.abort())
        expect(page.locator(f"{HEALTH}.away")).to_be_visible(timeout=30_000)
        page.unroute_all(behavior="ignoreErrors")
        expect(page.locator(HEALTH)).to_have_text(LIVE, timeout=30_000)


def test_a_killed_workers_row_says_that_it_is_gone(cluster, load, watch):
    with watch(cluster.balancer_url) as seen:
        page = seen.open("workers")
        cluster.workers[0].process.kill()
        row = page.locator("tbody tr", has=page.get_by_role("link", name="w0:0", exact=True))
        expect(row).to_contain_text("gone")
        page = seen.open("events")
        expect(page.locator("tbody tr", has_text="w0:0").first).to_be_visible()


def test_the_page_outlives_the_replica_that_served_it(cluster, load, watch):
    with watch(cluster.balancer_url, failures=True) as seen:
        page = seen.open("overview")
        cluster.routers[0].process.kill()
        expect(page.locator("[data-tile=replicas]")).to_have_text("1")
        expect(page.locator(HEALTH)).to_have_text(LIVE)
