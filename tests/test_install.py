"""Packages that each extra installs, and the contents of the wheel."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from app.core.check import page
from app.local.redis_server import free_port
from loadtest.traces import DEMO_TRACE
from tests.e2e.engines import Process, engine
from tests.eventually import eventually

F = TypeVar("F", bound=Callable[..., Any])

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def needs_torch(extra):
    """Whether an extra installs torch, itself or by others of ours."""
    ours = re.findall(r"kvroute\[([\w,]+)\]", " ".join(EXTRAS[extra]))
    others = [name for names in ours for name in names.split(",")]
    return any(re.match(r"torch\b", need) for need in EXTRAS[extra]) or any(
        map(needs_torch, others)
    )


def test_torch_is_installed_for_the_torch_engine_and_for_the_tests_alone():
    assert {extra for extra in EXTRAS if needs_torch(extra)} == {"torch", "dev"}


def test_the_demo_installs_no_torch():
    steps = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    [extras] = re.findall(r"-e '\.\[([\w,]+)\]'", steps)
    assert not any(map(needs_torch, extras.split(",")))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def test_a_page_that_a_message_names_is_installed_with_the_wheel(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    asked = "from app.core.check import page; print(page('operating.md'), end='')"
    path = subprocess.run(
        [sys.executable, "-P", "-c", asked],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert Path(path).is_relative_to(tmp_path)
    assert Path(path).read_text() == Path(page("operating.md")).read_text()


@pytest.mark.slow
async def test_the_sdist_makes_the_same_wheel_elsewhere_and_that_runs(
    wheel, tmp_path, own_redis_server
):
    build = [sys.executable, "-m", "hatchling", "build", "-t"]
    run = partial(subprocess.run, check=True, capture_output=True)
    run([*build, "sdist", "-d", str(tmp_path)], cwd=ROOT)
    [sdist] = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "sources", filter="data")
    [sources] = (tmp_path / "sources").iterdir()
    run([*build, "wheel", "-d", str(tmp_path)], cwd=sources)
    [made] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(made) as elsewhere, zipfile.ZipFile(wheel) as here:
        assert {one.filename: one.CRC for one in elsewhere.infolist()} == {
            one.filename: one.CRC for one in here.infolist()
        }
        elsewhere.extractall(tmp_path / "installed")
    shutil.rmtree(sources)
    path = {"PYTHONPATH": str(tmp_path / "installed")}
    command = ["env", *(f"{n}={v}" for n, v in path.items()), sys.executable, "-P", "-m", "app"]
    redis = f"--redis-url={own_redis_server.url}"
    asked = [sys.executable, "-P", "-c", "import app; print(app.__file__)"]
    file = run(asked, env=os.environ | path, cwd=tmp_path, text=True).stdout
    assert Path(file).is_relative_to(tmp_path)
    with ExitStack() as started:
        for part in (("worker", "--speedup=100"), ("router",)):
            process = Process(*part, redis, "--port=0", command=command, cwd=tmp_path)
            started.callback(process.end)
        await chat(process.url)


def test_the_wheel_has_the_load_tests_without_their_data(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("loadtest/")]
    assert "loadtest/replay.py" in names
    assert [name for name in names if not name.endswith(".py")] == []


def test_messages_name_pages_that_exist_by_where_they_are():
    texts = {p: p.read_text() for d in ("app", "workers") for p in (ROOT / d).rglob("*.py")}
    pages = {n for t in texts.values() for n in re.findall(r"\bpage\([\"']([\w-]+\.md)", t)}
    assert pages
    assert [name for name in pages if not Path(page(name)).exists()] == []
    # Where messages are written, a bare name is no use to whoever has only the wheel.
    said = [str(p) for p, t in texts.items() if re.search(r"see docs/|\(docs/[\w-]+\.md\)", t)]
    assert said == []


def pythons():
    """The oldest supported Python and the newest one that this machine has."""
    in_pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    by_minor = {}
    for minor in range(11, 30):
        name = f"python3.{minor}"
        named = shutil.which(name)
        for path in chain([Path(named)] if named else [], in_pyenv.glob(f"3.{minor}.*/bin/{name}")):
            # One of pyenv's stand-ins may stand for nothing.
            asked = [str(path), "-c", "import ensurepip"]
            if subprocess.run(asked, capture_output=True).returncode == 0:
                by_minor[minor] = path
    return [by_minor[minor] for minor in sorted({min(by_minor), max(by_minor)})]


class Installed:
    """The wheel, with extras, in an environment of its own."""

    def __init__(self, python, wheel, folder, extras=""):
        self.folder = folder
        subprocess.run([python, "-m", "venv", folder], check=True)
        wanted = f"{wheel}[{extras}]" if extras else str(wheel)
        pip = [self.program("pip"), "install", "--quiet", "-c", "constraints.txt"]
        subprocess.run([*pip, wanted], cwd=ROOT, check=True)

    def program(self, name):
        return str(self.folder / "bin" / name)

    def said(self, *arguments, program="kvroute", status=0, **variables):
        done = subprocess.run(
            [self.program(program), *arguments],
            cwd=self.folder,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    @contextmanager
    def running(self, *arguments, **variables):
        command = ["env", *(f"{n}={v}" for n, v in variables.items()), self.program("kvroute")]
        process = Process(*arguments, command=command, cwd=self.folder)
        try:
            yield process
        finally:
            process.end()
        assert "Traceback" not in process.said, process.said

    async def chats_with_a_cluster(self, **variables):
        """`kvroute up` answers a chat."""
        port = free_port()
        sizes = ("--workers=1", "--replicas=1", "--no-haproxy", f"--port={port}")
        with self.running("up", *sizes, "--log-level=info", **variables):
            await chat(f"http://127.0.0.1:{port}")


@pytest.fixture(params=pythons(), ids=lambda path: path.name)
def python(request):
    return request.param


@contextmanager
def of_checkout(*arguments):
    process = Process(*arguments)
    try:
        yield process
    finally:
        process.end()


CHAT = {"messages": [{"role": "user", "content": "What is a block?"}]}


async def chat(url, path="chat/completions", asked=CHAT):
    """The id of an answer of the router's first model, as soon as the router is ready."""
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as router:

        async def readiness():
            try:
                return (await router.get("/readiness")).status_code
            except httpx.TransportError:  # it does not listen yet
                return 0

        await eventually(readiness, lambda status: status == 200, within_s=60)
        model = (await router.get("/v1/models")).json()["data"][0]["id"]
        answer = await router.post(f"/v1/{path}", json={**asked, "model": model, "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        return answer.json()["id"]


def installs(test):
    """pip takes half a minute for an environment, and more where it must download."""
    return pytest.mark.slow(pytest.mark.timeout(900)(test))


@installs
async def test_the_plain_package_routes_a_chat_and_names_the_extra_of_what_it_lacks(
    python, wheel, tmp_path, own_redis_server
):
    plain = Installed(python, wheel, tmp_path / "plain")
    redis = f"--redis-url={own_redis_server.url}"
    with (
        of_checkout("worker", "--speedup=100", "--port=0", redis),
        plain.running("router", redis, "--port=0") as router,
    ):
        name = await chat(router.url)
        plain.said("doctor", redis, f"--router-url={router.url}")
        plain.said("inspect", "summary", redis)
        plain.said("explain", redis, name.removeprefix("chatcmpl-"))
        plain.said("whatif", redis, "--policy=blocks")
        for missing, extra in (
            (f"doctor {redis} --engine-url={router.url}", "worker"),
            (f"worker {redis}", "worker"),
            (f"agent {redis} --engine-url={router.url}", "worker"),
            ("up", "worker"),
            (f"planner {redis}", "planner"),
            ("replay", "loadtest"),
            ("demo", "loadtest"),
        ):
            said = plain.said(*missing.split(), status=1)
            assert f"is missing: pip install '.[{extra}]'" in said.splitlines()[-1]
        said = plain.said("router", redis, "--port=0", status=1, OTEL_TRACES_EXPORTER="otlp")
        assert "pip install '.[otel]'" in said
    plain.said("reset", redis, "--yes")


@installs
async def test_the_extra_of_workers_starts_engines_agents_and_clusters(
    python, wheel, tmp_path, own_redis_server
):
    installed = Installed(python, wheel, tmp_path / "worker", "worker")
    redis = f"--redis-url={own_redis_server.url}"
    with (
        engine() as beside,
        installed.running("agent", redis, "--port=0", f"--engine-url={beside.url}"),
        installed.running("router", redis, "--port=0") as router,
    ):
        await chat(router.url)
        installed.said("doctor", redis, f"--engine-url={beside.url}", "--probe")
        said = installed.said("worker", "--engine=torch", status=1)
        assert "pip install '.[torch]'" in said
    await installed.chats_with_a_cluster()


@installs
async def test_the_extra_of_torch_computes_an_answer(wheel, tmp_path, own_redis_server):
    installed = Installed(Path(sys.executable), wheel, tmp_path / "torch", "torch")
    redis = f"--redis-url={own_redis_server.url}"
    with (
        installed.running("worker", redis, "--port=0", "--engine=torch"),
        installed.running("router", redis, "--port=0") as router,
    ):
        await chat(router.url, "completions", {"prompt": [1, 2, 3]})


@installs
async def test_the_extra_of_the_planner_starts_one_and_knows_kubernetes(
    python, wheel, tmp_path, own_redis_server
):
    installed = Installed(python, wheel, tmp_path / "planner", "planner")
    redis = f"--redis-url={own_redis_server.url}"
    with installed.running("planner", redis, "--port=0") as planner:
        installed.said(
            "-c", f"import urllib.request as r; r.urlopen('{planner.url}/health')", program="python"
        )
        said = installed.said("planner", "explain", redis, status=1)
        assert "no planner has proposed anything" in said
    said = installed.said("planner", redis, "--connector=kubernetes", status=1)
    assert "kube" in said


@installs
async def test_the_extra_of_a_server_needs_no_installed_redis(python, wheel, tmp_path):
    installed = Installed(python, wheel, tmp_path / "embedded", "worker,embedded")
    await installed.chats_with_a_cluster(PATH="/nowhere")


@installs
async def test_the_extra_of_traces_traces_a_chat(python, wheel, tmp_path, own_redis_server):
    installed = Installed(python, wheel, tmp_path / "otel", "otel")
    redis = f"--redis-url={own_redis_server.url}"
    spans = []

    async def collect(request):
        spans.append(await request.read())
        return web.Response()

    async def collected():
        return spans

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    async with TestServer(app) as server:
        where = {"OTEL_EXPORTER_OTLP_ENDPOINT": str(server.make_url("")).rstrip("/")}
        where["OTEL_BSP_SCHEDULE_DELAY"] = "10"
        with (
            of_checkout("worker", "--speedup=100", "--port=0", redis),
            installed.running("router", redis, "--port=0", **where) as router,
        ):
            await chat(router.url)
            await eventually(collected)


@installs
async def test_the_extra_of_load_tests_plays_a_trace_and_locust(
    python, wheel, tmp_path, own_redis_server
):
    installed = Installed(python, wheel, tmp_path / "loadtest", "loadtest")
    redis = f"--redis-url={own_redis_server.url}"
    installed.said("demo", "--help")
    with (
        of_checkout("worker", "--speedup=100", "--port=0", redis),
        of_checkout("router", redis, "--port=0") as router,
    ):
        await chat(router.url)
        without = installed.said("replay", f"--url={router.url}", status=1)
        assert "only a checkout has the demo's trace" in without
        played = ("replay", f"--url={router.url}", f"--trace={DEMO_TRACE}", "--requests=4")
        installed.said(*played, "--speedup=100")
        locust = ("--headless", "-u", "2", "-r", "2", "-t", "2s", "--host", router.url)
        file = str(ROOT / "loadtest" / "locustfile.py")
        installed.said("-f", file, *locust, program="locust")
