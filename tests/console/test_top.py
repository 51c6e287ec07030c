"""`kvroute top`, on a terminal of its own and without one."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from rich.console import Console

from app.console.roster import COLUMNS
from app.console.screen import MODEL_COLUMNS, SORTED, Choices, screen
from app.core.worker_report import ForwardPassMetrics
from app.local.redis_server import EmbeddedRedis
from tests.e2e.engines import Process
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE, FakeWorkers

ROOT = Path(__file__).parents[2]
TOP = [sys.executable, "-m", "app.cli", "top"]


@pytest.fixture
async def workers(redis: Redis) -> FakeWorkers:
    fleet = FakeWorkers(redis)
    for name, usage in (("w1", 0.25), ("w2", 0.75)):
        await fleet.register(name)
        await fleet.report(name, ForwardPassMetrics(gpu_cache_usage_perc=usage))
    return fleet


@pytest.fixture
def router(one_redis_server: EmbeddedRedis) -> Iterator[Process]:
    process = Process(
        "router", "--port=0", f"--redis-url={one_redis_server.url}", f"--namespace={NAMESPACE}"
    )
    yield process
    process.end()


def once(url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOP, "--once", f"--router-url={url}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        env=os.environ | {"COLUMNS": "80"},
    )


async def test_it_prints_once_what_the_router_knows(workers: FakeWorkers, router: Process) -> None:
    async def printed() -> str:
        done = once(router.url)
        assert done.returncode == 0, done.stderr
        return done.stdout

    text = await eventually(printed, lambda text: "75%" in text)
    assert f"namespace {NAMESPACE}" in text
    assert text.index("w2:0") > 0
    assert "25%" in text
    assert max(map(len, text.splitlines())) <= 80


def until(terminal: int, text: str) -> None:
    """Return once the other end has written that."""
    seen = b""
    while text.encode() not in seen:
        seen += os.read(terminal, 4096)


def ended(terminal: int) -> bool:
    """True once nobody has the other end open any more."""
    while True:
        try:
            os.read(terminal, 4096)
        except OSError:
            return True


@pytest.mark.usefixtures("workers")
def test_arrows_sort_and_q_ends(router: Process) -> None:
    terminal, end = pty.openpty()
    with subprocess.Popen(
        [*TOP, f"--router-url={router.url}"], cwd=ROOT, stdin=end, stdout=end, stderr=end
    ) as process:
        os.close(end)
        until(terminal, "state▾")
        os.write(terminal, b"\x1b[C")
        until(terminal, "queue▾")
        os.write(terminal, b"q")
        assert ended(terminal)
        assert process.wait(10) == 0
    os.close(terminal)


def test_a_router_that_is_away_is_named() -> None:
    done = once("http://127.0.0.1:9")
    assert done.returncode == 1
    assert "http://127.0.0.1:9/console/api/overview" in done.stderr


MODEL = ("m\x1b[2J", 50, 25, *range(5, 12), 0.3)


def worker(name: str, **values: Any) -> list[Any]:
    known = {"worker": name, "state": "live", "queue_s": 0.0, "requests": 0, "max_requests": 8}
    return [(known | values).get(column) for column in COLUMNS]


def answers(*rows: list[Any]) -> dict[str, Any]:
    tiles = ("workers", "requests_per_s", "refused_per_s", "degraded_per_s", "waiting", "queue_s")
    endings = ("failed_share", "left_before_per_s", "output_tokens_per_s", "in_time_share")
    work = ("retries_per_s", "migrations_per_s", "sources_per_s")
    times = ("ttft_p50_s", "ttft_p99_s", "decision_p50_s", "decision_p99_s", "cached_share")
    return {
        "overview": {
            "namespace": "n",
            "tiles": dict.fromkeys((*tiles, *endings, *work, *times, "predicted_share")),
            "replicas": {"rows": []},
            "redis": {"version": "7", "used_bytes": 0, "rtt_s": 0.001},
            "models": {"columns": (*MODEL_COLUMNS, "failed_share"), "rows": [MODEL]},
            "errors": {
                "columns": ("requests", "worker", "cause", "words"),
                "rows": [(3, "w1:0", "status_500", "CUDA out of \x1b[2Jmemory " * 9)],
            },
            "findings": [
                {"name": "redis", "level": "bad", "detail": "slow " * 40, "remedy": "move it"},
                {"name": "clocks", "level": "ok", "detail": "alike", "remedy": ""},
            ],
        },
        "workers": {"columns": COLUMNS, "rows": list(rows)},
        "decisions": {"columns": [], "rows": []},
    }


def drawn(found: dict[str, Any], choices: Choices, height: int | None = None) -> str:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(screen(found, choices, height))
    return capture.get()


def test_workers_are_sorted_by_the_column_chosen_and_the_unknown_come_last() -> None:
    found = answers(worker("a", kv_used=0.1), worker("b"), worker("c", kv_used=0.9))
    choices = Choices(sort=SORTED.index("kv_used"))
    for chosen, order in ((choices, "cab"), (choices.after("r"), "acb")):
        lines = drawn(found, chosen).splitlines()
        assert "".join(line.split()[0] for line in lines if " live" in line) == order


def test_the_worker_in_most_trouble_comes_first_and_models_have_their_endings() -> None:
    rows = [worker("a", trouble=0), worker("b", trouble=3), worker("c", trouble=2e6)]
    lines = drawn(answers(*rows), Choices()).splitlines()
    assert [line.split()[0] for line in lines if " live" in line] == ["c", "b", "a"]
    model = next(line.split() for line in lines if line.split()[:1] == ["m\\u001b[2J"])
    assert model[1:] == ["50", "25", "5", "6", "7", "8", "9", "10", "11"]


def test_many_workers_are_scrolled_and_all_fits_the_screen() -> None:
    found = answers(*(worker(f"w{n:03}", queue_s=float(n)) for n in range(300)))
    choices = Choices(sort=SORTED.index("queue_s"), descending=False)
    assert "w000" in drawn(found, choices, 24)
    for _ in range(5):
        choices = choices.after("down")
    text = drawn(found, choices, 24)
    assert "w004" not in text
    assert "w005" in text
    assert len(text.splitlines()) <= 24


def test_text_from_outside_moves_no_cursor_and_is_no_markup() -> None:
    text = drawn(answers(worker("\x1b[2J[red]x")), Choices())
    assert "\\u001b[2J[red]x" in text
    assert "\x1b" not in text
    assert "alike" not in text
