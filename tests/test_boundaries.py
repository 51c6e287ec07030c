"""Boundaries between packages. Real modules are imported in fresh processes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

NEEDS_TORCH = frozenset(
    {
        "loadtest.bench_tiers",
        "workers.engines.torch.llama",
        "workers.engines.torch.loading",
        "workers.engines.torch.sampling",
        "workers.engines.torch.sequence",
        "workers.engines.torch.attention",
        "loadtest.bench_gpu",
        "workers.engines.torch.tiers",
        "workers.engines.torch.engine",
        "workers.engines.torch.transfer",
        "workers.engines.torch.forward",
        "workers.engines.torch.waiting",
        "workers.engines.torch.prefills",
        "workers.kv.copiers",
        "workers.kv.memory",
        "workers.kv.transfer.layer_groups",
        "workers.kv.transfer.receiver",
        "workers.kv.transfer.sender",
        "workers.kv.copies",
    }
)

NEEDS_H2 = frozenset(
    f"app.gateway.{name}"
    for name in ("processor", "grpc_server", "gateway_request", "picker", "messages", "ext_proc")
)

# For each line `package without modules`, in turn: imports that and all modules below it except
# those, and prints in one line what is loaded by then.
IMPORT_ALL = """
import importlib, pkgutil, sys
for line in sys.stdin.read().splitlines():
    root, *without = line.split()
    package = importlib.import_module(root)
    below = pkgutil.walk_packages(getattr(package, "__path__", []), root + ".")
    for name in [found.name for found in below]:
        if name not in without:
            importlib.import_module(name)
    print(*sys.modules)
"""


@dataclass(frozen=True, slots=True)
class Boundary:
    """`package` and all below it, `without` some modules, must load no package in `never`."""

    package: str
    never: frozenset[str]
    without: frozenset[str] = frozenset()

    def __str__(self):
        return " without ".join((self.package, *sorted(self.without)))


TESTS = frozenset({"tests", "loadtest", "tools"})
WEB = frozenset({"fastapi", "starlette", "uvicorn"})
ROOMS = frozenset(
    f"app.{name}"
    for name in (
        "core",
        "policy",
        "state",
        "router",
        "http",
        "tokens",
        "door",
        "edge",
        "console",
        "ops",
        "local",
        "options",
        "planner",
        "simulation",
        "gateway",
    )
)


def beyond(*rooms):
    return TESTS | {"workers"} | (ROOMS - {f"app.{room}" for room in rooms})


SERVED = frozenset(
    {
        "workers.server.chat_paths",
        "workers.engine_agent",
        "workers.server.paths",
    }
)

# Each list is imported in one process, in its order, as imports take most of the time. Whatever is
# loaded by then must be allowed: a package comes after others only where it may load all they do.
CHAINS = [
    [
        Boundary("app.core", WEB | {"redis", "click", "torch", "asyncio"} | beyond("core")),
        Boundary(
            "app.policy", WEB | {"redis", "click", "torch", "asyncio"} | beyond("core", "policy")
        ),
        Boundary(
            "app.simulation",
            WEB | {"redis", "click", "torch", "asyncio"} | beyond("core", "policy", "simulation"),
        ),
        Boundary(
            "app.planner.rules",
            WEB
            | {"redis", "click", "torch", "asyncio"}
            | {"app.planner.observe", "app.planner.connectors"}
            | beyond("core", "policy", "simulation", "planner"),
        ),
    ],
    [
        # Of app.policy it knows the record of a decision, and what that is made of.
        Boundary(
            "app.state",
            WEB | {"click", "torch", "app.policy.plan"} | beyond("core", "policy", "state"),
        ),
        # Of app.http it knows app.http.metrics.
        Boundary(
            "app.router",
            WEB | {"click", "torch"} | beyond("core", "policy", "state", "router", "http"),
        ),
        Boundary(
            "app.door",
            WEB
            | {"torch", "transformers"}
            | beyond("core", "policy", "state", "router", "http", "tokens", "door"),
        ),
        Boundary(
            "app.edge",
            frozenset({"aiohttp", "torch"})
            | beyond(
                *("core", "policy", "state", "router", "http", "tokens", "door", "options", "ops"),
                *("console", "edge"),
            ),
        ),
        Boundary(
            "app.gateway",
            frozenset({"aiohttp", "torch"})
            | beyond(
                *("core", "policy", "state", "router", "http", "tokens", "door", "options", "ops"),
                *("console", "edge", "gateway"),
            ),
        ),
    ],
    [
        Boundary("app.options", WEB | {"redis", "torch"} | beyond("core", "policy", "options")),
        Boundary("app.cli", WEB | {"redis", "torch"} | beyond("core", "policy", "options")),
        Boundary(
            "app.ops",
            WEB | {"aiohttp", "torch"} | beyond("core", "policy", "state", "options", "ops"),
        ),
        Boundary(
            "app.console",
            WEB
            | {"aiohttp", "torch"}
            | beyond("core", "policy", "state", "router", "http", "options", "ops", "console"),
            without=frozenset({"app.console.page", "app.console.routes"}),
        ),
    ],
    [
        Boundary("app.http", frozenset({"fastapi", "redis", "torch"}) | beyond("core", "http")),
        Boundary(
            "app.local",
            frozenset({"fastapi", "redis", "torch"})
            | beyond("core", "http", "policy", "options", "local"),
        ),
        Boundary(
            "app.planner",
            frozenset({"fastapi", "torch"})
            | beyond(
                *("core", "policy", "state", "router", "http", "local", "options", "simulation"),
                "planner",
            ),
        ),
        Boundary(
            "app",
            TESTS | {"torch", "workers", "opentelemetry.exporter", "h2"},
            without=NEEDS_H2,
        ),
    ],
    [
        Boundary(
            "app.tokens", WEB | {"redis", "click", "huggingface_hub"} | beyond("core", "tokens")
        )
    ],
    [
        Boundary("workers.bridge", WEB | {"torch"}),
        Boundary("workers.agent", WEB | {"torch"}),
        Boundary("workers", WEB | {"torch"}, without=SERVED | NEEDS_TORCH | {"workers.main"}),
        Boundary("workers", frozenset({"torch"}), without=NEEDS_TORCH),
        Boundary(
            "workers",
            frozenset({"fastapi"})
            | (beyond("core", "state", "http", "tokens", "simulation") - {"workers"}),
        ),
    ],
    # Alone: locust patches what Kubernetes' client has loaded by then.
    [Boundary("loadtest", frozenset({"torch", "tests", "tools", "app.edge"}), without=NEEDS_TORCH)],
]


def loaded(*imported, root=ROOT):
    """Names of all modules in a fresh process that imported these in turn, after each of them."""
    missing = NEEDS_TORCH if importlib.util.find_spec("torch") is None else frozenset()
    if importlib.util.find_spec("h2") is None:
        missing |= NEEDS_H2
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        input="\n".join(" ".join((one.package, *one.without, *missing)) for one in imported),
        cwd=root,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: " ".join(b.package for b in chain))
def test_a_package_never_loads_what_lies_beyond_its_boundary(chain):
    crossed = {str(b): names & b.never for b, names in zip(chain, loaded(*chain), strict=True)}
    assert {name: modules for name, modules in crossed.items() if modules} == {}


def test_every_package_of_app_has_a_boundary():
    packages = {f"app.{path.parent.name}" for path in (ROOT / "app").glob("*/__init__.py")}
    assert packages - {boundary.package for chain in CHAINS for boundary in chain} == set()


def test_app_core_loads_three_libraries_and_nothing_else():
    anyway, core = (
        {name.partition(".")[0] for name in names}
        for names in loaded(Boundary("json", frozenset()), Boundary("app.core", frozenset()))
    )
    assert core - anyway - sys.stdlib_module_names <= {"app", "numpy", "orjson", "xxhash"}


def test_a_decision_is_given_the_time_and_does_not_read_it():
    """numpy loads `time`, so that loaded modules say nothing of it."""
    imports = re.compile(r"^\s*(import|from) (time|datetime|asyncio)\b", re.MULTILINE)
    packages = ("app/policy", "app/simulation", "app/planner/rules")
    files = [path for package in packages for path in (ROOT / package).glob("*.py")]
    assert [path.name for path in files if imports.search(path.read_text())] == []


def test_a_module_that_crosses_its_boundary_is_detected_at_any_depth(tmp_path):
    for path, text in {
        "shop/__init__.py": "",
        "shop/shelf/__init__.py": "",
        "shop/shelf/tin.py": "import wave",
        "shop/till.py": "import chunk_of_nothing",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    [modules] = loaded(Boundary("shop", frozenset(), frozenset({"shop.till"})), root=tmp_path)
    assert {"shop.shelf.tin", "wave"} <= modules
    assert "shop.till" not in modules
    with pytest.raises(AssertionError, match="No module named 'chunk_of_nothing'"):
        loaded(Boundary("shop", frozenset()), root=tmp_path)


def test_operators_commands_print_through_what_escapes():
    prints = re.compile(r"click\.s?echo\(|(?<![\w.])print\(")
    found = [
        str(path.relative_to(ROOT))
        for package in ("ops", "console")
        for path in sorted((ROOT / "app" / package).glob("*.py"))
        if prints.search(path.read_text())
    ]
    assert found == ["app/ops/terminal.py"]


def test_the_wall_clock_is_read_only_to_date_what_is_said_and_for_a_metric():
    """Machines compare times by the Redis clock alone, so no other clock has to be right."""
    reads = re.compile(
        r"time\.(time|gmtime|localtime|ctime)|(?<!_[mc])time_ns|datetime|from time |import time as"
    )
    found = [
        (str(path.relative_to(ROOT)), line.strip())
        for package in ("app", "workers")
        for path in sorted((ROOT / package).rglob("*.py"))
        for line in path.read_text().splitlines()
        if reads.search(line)
    ]
    assert sorted(found) == [
        (
            "app/door/record.py",
            "came_at: datetime = field(default_factory=partial(datetime.now, UTC))",
        ),
        ("app/door/record.py", "from datetime import UTC, datetime"),
        ("app/edge/errors.py", "at = datetime.now(UTC) + timedelta(seconds=full_s)"),
        ("app/edge/errors.py", "from datetime import UTC, datetime, timedelta"),
        ("app/edge/models.py", "BEGUN_S = int(time.time())"),
        ("app/ops/checks.py", "ahead_s = time.time() - (seconds + micros / 1e6)"),
        ("app/tokens/templates.py", "from datetime import datetime"),
        ("app/tokens/templates.py", "return datetime.now().strftime(format)"),
        (
            "workers/bridge/events/stream.py",
            "self.counters.lag_s = max(0.0, time.time() - batch.ts)",
        ),
        ("workers/server/answer.py", "return int(time.time())"),
    ]
