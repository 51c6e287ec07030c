"""A loaded cluster is upgraded as docs/upgrading.md says, and no request is lost."""

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path

import httpx
import orjson
import pytest

from app.core.keys import DATA_VERSION
from app.local.redis_server import LOOPBACK, free_port, system_binary
from tests.eventually import eventually

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/upgrading.md").read_text()
LAST_RELEASE = "688a358e"
"""The commit that cut it, as no tag names it."""
MODEL, NUM_TOKENS, CLIENTS = "m", 12, 8
LONG_TOKENS, LONG_S = 12_000, 10.0
PAIR = (0, 1)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("hatchling")
    if system_binary("haproxy") is None:
        pytest.skip("haproxy is not installed")
    return tmp_path_factory.mktemp("releases")


def source_of_the_last_release(into):
    archive = subprocess.run(
        ["git", "archive", LAST_RELEASE], cwd=ROOT, capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip("this clone has no history, and so no last release")
    into.mkdir()
    subprocess.run(["tar", "-x", "-C", into], input=archive.stdout, check=True)


def own_source(into, *, version="", data_version=DATA_VERSION):
    left_out = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "shared")
    shutil.copytree(ROOT, into, ignore=left_out)
    for path, pattern, text in (
        ("pyproject.toml", r'(?m)^version = ".*"$', version and f'version = "{version}"'),
        ("app/core/keys.py", r"(?m)^DATA_VERSION = \d+$", f"DATA_VERSION = {data_version}"),
    ):
        if text:
            changed, count = re.subn(pattern, text, (into / path).read_text())
            assert count == 1
            (into / path).write_text(changed)


def installed(source):
    """The folder with the commands of the wheel that is built from a source."""
    wheels, there = source.with_suffix(".wheels"), source.with_suffix(".installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    [wheel] = wheels.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target"]
    subprocess.run([*pip, str(there), str(wheel)], check=True, capture_output=True)
    command = there / "bin" / "kvroute"
    # Else it would find the packages of the checkout that the interpreter has.
    script = f'#!/bin/sh\nPYTHONPATH={there} exec {sys.executable} -P -m app "$@"\n'
    command.write_text(script)
    command.chmod(0o755)
    return command.parent


def data_version_in(commands):
    asked = "from app.core.keys import DATA_VERSION; print(DATA_VERSION)"
    environment = {**os.environ, "PYTHONPATH": str(commands.parent)}
    told = subprocess.run(
        [sys.executable, "-P", "-c", asked], env=environment, capture_output=True, check=True
    )
    return int(told.stdout)


@pytest.fixture(scope="module")
def release(folder):
    """Returns the folder of a release's commands, by name: the last one, this one, a later one."""

    @cache
    def made(name):
        source = folder / name
        if name == "last":
            source_of_the_last_release(source)
        else:
            later = {"this": {}, "later": {"version": "99.0.0"}}
            next_one = {"version": "99.0.0", "data_version": DATA_VERSION + 1}
            own_source(source, **(later | {"next": next_one})[name])
        return installed(source)

    return made


def pair_of(release, *, same_version):
    """The commands of an old release and of a new one: the last one and this, if their versions of
    the data model are as asked for; else this one and what may follow."""
    last = release("last")
    if (data_version_in(last) == DATA_VERSION) == same_version:
        return last, release("this")
    return release("this"), release("later" if same_version else "next")


def blocks(heading):
    """The commands that the page has under a heading."""
    [section] = re.findall(rf"(?ms)^## {heading}\n(.*?)(?=^## |\Z)", PAGE)
    return re.findall(r"(?ms)^```sh\n(.*?)^```", section)


class Fleet:
    """Two routers and two workers of the old release, the balancer, and what is started later."""

    def __init__(self, old, new, server, folder):
        self.ports = [free_port() for _ in range(4)]
        self.old_urls = [f"http://{LOOPBACK}:{port}" for port in self.ports[:2]]
        front = free_port()
        self.url = f"http://{LOOPBACK}:{front}"
        self.worker_ports = [free_port() for _ in PAIR]
        self.environment = {
            **os.environ,
            "REDIS_URL": server.url,
            "KVROUTE_MODEL_NAME": MODEL,
            "KVROUTE_SPEEDUP": "20",
            "KVROUTE_SHOW_DECISION": "true",
            "PATH": f"{new}:{os.environ['PATH']}",
        }
        self._old, self._folder = str(old / "kvroute"), folder
        self._running = []
        self.old_routers = [self._start("router", f"--port={port}") for port in self.ports[:2]]
        self.old_workers = [self._start("worker", "--port=0", f"--worker-id=old-{n}") for n in PAIR]
        self._balance(front, enabled=2)

    def _start(self, *arguments):
        return self._run([self._old, *arguments], self.environment)

    def _run(self, command, environment):
        """A process, and what it starts itself, until the end."""
        with (self._folder / f"log-{len(self._running)}").open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self._running.append(process)
        return process

    def _balance(self, front, enabled):
        self._stats = self._folder / "stats"
        servers = "".join(
            f"    server r{n} {LOOPBACK}:{port} {'' if n < enabled else 'disabled'}\n"
            for n, port in enumerate(self.ports)
        )
        config = self._folder / "haproxy.cfg"
        stats = f"global\n    stats socket {self._stats} level admin\n"
        config.write_text(stats + (ROOT / "deploy/haproxy.cfg").read_text() + servers)
        where = {"KVROUTE_BALANCER_HOST": LOOPBACK, "KVROUTE_BALANCER_PORT": str(front)}
        command = [str(system_binary("haproxy")), "-db", "-f", str(config)]
        self._run(command, {**os.environ, **where})

    def put_behind_the_balancer(self, *numbers, verb=b"enable"):
        for number in numbers:
            with socket.socket(socket.AF_UNIX) as to_haproxy:
                to_haproxy.connect(str(self._stats))
                to_haproxy.sendall(b"%b server routers/r%d\n" % (verb, number))
                to_haproxy.recv(4096)

    async def follow(self, text, **variables):
        """Do what a block of the page says."""
        script = self._run(["bash", "-euxc", text], self.environment | variables)

        async def status():
            # Whose parent does not ask how they ended would still be there for `kill -0`.
            return [process.poll() for process in self._running][self._running.index(script)]

        assert await eventually(status, lambda code: code is not None, within_s=180.0) == 0

    def end(self):
        for process in self._running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._running:
            process.wait(30)


@contextmanager
def fleet(old, new, server, folder):
    started = Fleet(old, new, server, folder)
    try:
        yield started
    finally:
        started.end()


class Load:
    """Chats of some clients, one after another, streamed or not. answered: by worker; and what was
    answered instead."""

    def __init__(self, http):
        self._http = http
        self.answered = Counter()
        self.lost = []
        self.long_s = []
        """How long each long answer took."""

    async def ask(self, client):
        number = 0
        while True:
            number += 1
            turns = [{"role": "user", "content": f"{client} {n}"} for n in range(1 + number % 5)]
            num_tokens = NUM_TOKENS if client % 3 else LONG_TOKENS
            body = {"model": MODEL, "messages": turns, "max_tokens": num_tokens}
            body |= {"ignore_eos": True}
            headers = {"x-session-id": f"c{client}"} if client % 2 else {}
            is_stream = bool(number % 2)
            began_s = time.monotonic()
            try:
                answer = await self._http.post(
                    "/v1/chat/completions",
                    json=body | ({"stream": True} if is_stream else {}),
                    headers=headers,
                )
                self._judge(answer, is_stream, num_tokens)
                if num_tokens == LONG_TOKENS:
                    self.long_s.append(time.monotonic() - began_s)
            except httpx.TransportError as error:
                self.lost.append(repr(error))

    def _judge(self, answer, is_stream, num_tokens):
        text = answer.text
        if answer.status_code != 200:
            self.lost.append(f"{answer.status_code}: {text}")
            return
        is_whole = (
            text.rstrip().endswith("data: [DONE]")
            if is_stream
            else orjson.loads(text)["usage"]["completion_tokens"] == num_tokens
        )
        if not is_whole:
            self.lost.append(text[-500:])
        self.answered[answer.headers.get("x-kvroute-worker", "?")] += 1

    async def goes_to(self, name):
        """Returns once all of what is asked goes to workers whose names begin so."""

        async def lately():
            before = self.answered.copy()
            await asyncio.sleep(1)
            return {worker[:3] for worker in (self.answered - before)}

        await eventually(lately, lambda found: found == {name}, within_s=60.0)


async def until_whole(fleet, http):
    """Returns once the balancer has both old routers, and each of these both old workers."""

    async def workers(url):
        with suppress(httpx.TransportError):
            answer = await http.get(f"{url}/v1/workers")
            models = (await http.get(f"{url}/v1/models")).json()
            return len(answer.json().get("workers", ())) if models.get("data") else 0
        return 0

    for url in (*fleet.old_urls, *[fleet.url] * 4):
        await eventually(lambda url=url: workers(url), lambda found: found == 2, within_s=90.0)


@asynccontextmanager
async def load(fleet):
    """Nothing of it is lost."""
    async with httpx.AsyncClient(base_url=fleet.url, timeout=60) as http:
        await until_whole(fleet, http)
        asking = Load(http)
        tasks = [asyncio.create_task(asking.ask(client)) for client in range(CLIENTS)]
        try:
            await asking.goes_to("old")
            yield asking
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    assert asking.lost == []
    assert len(asking.long_s) >= 3
    assert min(asking.long_s) >= LONG_S
    assert asking.answered["?"] == 0


async def test_parts_are_replaced_one_by_one_where_the_data_version_stays(
    release, one_redis_server, tmp_path
):
    worker_block, router_block = blocks("The same data version")
    old, new = pair_of(release, same_version=True)
    with fleet(old, new, one_redis_server, tmp_path) as fleet_:
        async with load(fleet_) as asking:
            for n in PAIR:
                text = worker_block.replace("new-0", f"new-{n}")
                text = text.replace("8101", str(fleet_.worker_ports[n]))
                await fleet_.follow(text, OLD_WORKER=str(fleet_.old_workers[n].pid))
            for n in PAIR:
                fleet_.put_behind_the_balancer(2 + n)
                text = router_block.replace("8091", str(fleet_.ports[2 + n]))
                await fleet_.follow(text, OLD_ROUTER=str(fleet_.old_routers[n].pid))
            await asking.goes_to("new")
            assert [part.wait(60) for part in (*fleet_.old_routers, *fleet_.old_workers)] == [0] * 4
            await asyncio.sleep(1)


async def test_a_second_namespace_takes_over_where_the_data_version_rises(
    release, one_redis_server, tmp_path
):
    start, stop = blocks("The next data version")
    old, new = pair_of(release, same_version=False)
    with fleet(old, new, one_redis_server, tmp_path) as fleet_:
        texts = []
        for n in PAIR:
            text = start.replace("new-0", f"new-{n}").replace("8091", str(fleet_.ports[2 + n]))
            texts.append(text.replace("8101", str(fleet_.worker_ports[n])))
        async with load(fleet_) as asking:
            for text in texts:
                await fleet_.follow(text)
            fleet_.put_behind_the_balancer(2, 3)
            fleet_.put_behind_the_balancer(*PAIR, verb=b"disable")
            await fleet_.follow(
                stop,
                LONGEST_ANSWER_S="25",
                OLD_ROUTERS=" ".join(str(part.pid) for part in fleet_.old_routers),
                OLD_WORKERS=" ".join(str(part.pid) for part in fleet_.old_workers),
            )
            await asking.goes_to("new")
            assert [part.wait(60) for part in (*fleet_.old_routers, *fleet_.old_workers)] == [0] * 4
