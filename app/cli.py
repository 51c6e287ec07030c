"""The `kvroute` command. Subcommands import what they need when called."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import socket
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

import click

from app.config_file import FILE, read_again, unknown_variables, with_config_file
from app.core.errors import ConfigError, MissingPackage
from app.core.extras import extra
from app.core.keys import Keyspace
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import COMMON, LOG_LEVELS, Text, parse_engines
from app.core.settings.planner import PlannerSettings
from app.core.settings.router import CARRIAGE_SETTINGS, PickerSettings, RouterSettings
from app.core.settings.worker import WorkerSettings
from app.options import (
    CLUSTER,
    PORT,
    Command,
    Group,
    Option,
    cluster_size,
    option_type,
    options,
    pick,
)
from app.output import ErrHandler

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
AGENT_SETTINGS = ("engine_api_key", "namespace", "log_level", "max_requests", "drain_s")
"""What `up` tells agents as it is told to workers."""
POLL_S = 0.5
REDIS_TIMEOUT_S = 5.0
_USUAL = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
"""Where a value is from that nobody has typed."""


def _start_log(level: str) -> None:
    """Log from now on, and first of variables that somebody may have misspelt."""
    logging.basicConfig(level=level.upper(), handlers=[ErrHandler(LOG_FORMAT)])
    for name, problem in list(unknown_variables(os.environ)):
        logging.getLogger("kvroute").warning(problem)
        del os.environ[name]  # said once is enough, also by processes that are started from here


def _end_when_told() -> None:
    """End at once if told to stop before the server takes SIGTERM and SIGINT over.

    As process 1 of a container, one without a handler would start all the same, and serve until it
    is killed.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


class _LazyGroup(Group):
    """Finds commands of other modules on demand; lists those whose extra is installed."""

    lazy: ClassVar[dict[str, str]] = {}
    """Name -> module that has the command."""
    extras: ClassVar[dict[str, str]] = {}
    """Name -> extra that its module needs, of those that need one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *filter(self._is_installed, self.lazy)])

    def _is_installed(self, name: str) -> bool:
        with suppress(MissingPackage):
            self._module(name)
            return True
        return False

    def _module(self, name: str) -> ModuleType:
        with extra(self.extras[name]) if name in self.extras else nullcontext():
            return importlib.import_module(self.lazy[name])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(self._module(cmd_name), cmd_name)
        return command


class _Main(_LazyGroup):
    lazy: ClassVar = {
        "replay": "loadtest.replay",
        "demo": "loadtest.demo",
        "inspect": "app.ops.inspect",
        "doctor": "app.ops.doctor",
        "drain": "app.ops.drain",
        "explain": "app.ops.explain",
        "whatif": "app.ops.explain",
        "reset": "app.ops.reset",
        "usage": "app.ops.usage",
    }
    extras: ClassVar = {"replay": "loadtest", "demo": "loadtest"}


class _Planner(_LazyGroup):
    lazy: ClassVar = {"explain": "app.ops.proposals"}


@click.group(cls=_Main, context_settings={"max_content_width": 100})
@click.version_option(package_name="kvroute")
def main() -> None:
    """kvroute sends each LLM request to the worker where it will start soonest.

    An option that shows an environment variable can also be set with that variable.
    """


@main.command(cls=Command)
@with_config_file
@options(RouterSettings)
def router(**values: Any) -> None:
    """Run one router replica. Any number of replicas can share a Redis behind a load balancer."""
    _end_when_told()
    from app.edge.app import serve_router
    from app.http.server import listen, run

    settings = RouterSettings(**values)
    _start_log(settings.log_level)
    Keyspace(settings.namespace)  # a bad one is refused before a port is taken
    # First, while the number cannot yet be that of a socket of our own.
    shared = [] if settings.shared_fd is None else [_inherited(settings.shared_fd)]
    sockets = [listen(settings.host, settings.port), *shared]
    ctx = click.get_current_context()
    run(
        serve_router(
            settings,
            *sockets,
            file=ctx.meta[FILE],
            read=lambda: RouterSettings(**read_again(ctx)),
        )
    )


@main.command(cls=Command)
@with_config_file
@options(PickerSettings, without=CARRIAGE_SETTINGS)
def picker(**values: Any) -> None:
    """Tell gateways where requests go, by Envoy's ext_proc. Any number of pickers can share a
    Redis."""
    _end_when_told()
    settings = _picker_settings(values)
    _start_log(settings.log_level)
    from app.http.server import listen, run

    with extra("gateway"):
        from app.gateway.processor import serve
    Keyspace(settings.namespace)  # a bad one is refused before a port is taken
    ctx = click.get_current_context()
    run(
        serve(
            settings,
            listen(settings.host, settings.port),
            file=ctx.meta[FILE],
            read=lambda: _picker_settings(read_again(ctx)),
        )
    )


def _picker_settings(values: dict[str, Any]) -> PickerSettings:
    # Comments are for who waits for a stream that this process sends.
    return PickerSettings(**values, comment_every_s=0.0)


@main.command(cls=Command)
@with_config_file
@options(WorkerSettings)
def worker(**values: Any) -> None:
    """Run one worker: an engine and the agent that publishes its cache and load."""
    _end_when_told()
    settings = WorkerSettings(**values)
    _start_log(settings.log_level)
    from app.http.server import run

    with extra("worker"):
        from workers.main import serve
    run(serve(settings))


@main.command(cls=Command)
@with_config_file
@options(EngineAgentSettings)
def agent(**values: Any) -> None:
    """Run beside an engine, such as vLLM or SGLang, and make it a worker."""
    _end_when_told()
    settings = EngineAgentSettings(**values)
    _start_log(settings.log_level)
    from app.http.server import run

    with extra("worker"):
        from workers.engine_agent import serve
    run(serve(settings))


@main.group(cls=_Planner, invoke_without_command=True)
@with_config_file
@options(PlannerSettings)
@click.pass_context
def planner(ctx: click.Context, /, **values: Any) -> None:
    """Keep a fleet at the size that its load needs; `explain` shows what was proposed."""
    if ctx.invoked_subcommand is not None:
        return
    _end_when_told()
    settings = PlannerSettings(**values)
    _start_log(settings.log_level)
    from app.http.server import run

    with extra("planner"):
        from app.planner.main import serve
    run(serve(settings))


@main.command(cls=Command)
@with_config_file
@cluster_size(least_workers=0)
@click.option(
    "--engine",
    default="sim",
    type=option_type(Text("sim|torch|URL,...", parse_engines, ",")),
    envvar="KVROUTE_ENGINE",
    show_envvar=True,
    show_default=True,
    help="sim or torch: of the workers that are started. Or the base URL of one that runs already, "
    "such as vLLM or SGLang, or of several: these are the workers then, with one router unless "
    "--replicas says otherwise.",
    cls=Option,
    heading=CLUSTER,
)
@click.option(
    "--engine-api-key",
    default="",
    envvar="KVROUTE_ENGINE_API_KEY",
    show_envvar=True,
    help="API key that the engines ask for, if they do.",
    cls=Option,
    heading=CLUSTER,
)
@click.option(
    "--redis",
    "--redis-url",
    "redis_url",
    envvar="REDIS_URL",
    show_envvar=True,
    help="Redis to use; unset: an embedded one.",
    cls=Option,
    heading=CLUSTER,
)
@click.option(
    "--balancer-host",
    default="127.0.0.1",
    envvar="KVROUTE_BALANCER_HOST",
    show_envvar=True,
    show_default=True,
    help="Address the balancer listens on.",
    cls=Option,
    heading=CLUSTER,
)
@click.option(
    "--port",
    default=8080,
    type=PORT,
    envvar="KVROUTE_BALANCER_PORT",
    show_envvar=True,
    show_default=True,
    help="Port the balancer listens on; 0 takes a free one.",
    cls=Option,
    heading=CLUSTER,
)
@click.option(
    "--haproxy/--no-haproxy",
    default=None,
    help="Balance with HAProxy. Default: if it is installed.",
    cls=Option,
    heading=CLUSTER,
)
@click.option(
    "--gateway",
    default="",
    type=click.Choice(("", "envoy")),
    help="Have Envoy, which must be installed, carry the requests, and ask the replicas where each "
    "goes, which are pickers then.",
    cls=Option,
    heading=CLUSTER,
)
@options(
    RouterSettings,
    without=("redis_url", "port", "shared_fd", "log_level", "tls_cert", "tls_key"),
)
@options(
    WorkerSettings,
    without=(
        *("redis_url", "namespace", "host", "log_level", "port", "worker_id", "address"),
        *("worker_key", "metrics_key", "role", "kv_port", "engine", "drain_s"),
    ),
)
@click.option(
    "--prefill-workers",
    "num_prefill",
    default=0,
    type=click.IntRange(0, 1000),
    show_default=True,
    help="Of the workers, those that only compute prompts for others; with --kv-transfer.",
    cls=Option,
    heading=CLUSTER,
)
@click.option(
    "--decode-workers",
    "num_decode",
    default=0,
    type=click.IntRange(0, 1000),
    show_default=True,
    help="Of the workers, those that compute no prompts for others; with --kv-transfer.",
    cls=Option,
    heading=CLUSTER,
)
@click.option(
    "--planner/--no-planner",
    "with_planner",
    default=False,
    help="Have a planner start and stop the workers, of which there are then at least --workers; 0 "
    "lets the last one leave.",
    cls=Option,
    heading=CLUSTER,
)
@options(
    PlannerSettings,
    without=(
        *("redis_url", "namespace", "host", "log_level", "port", "connector", "min_workers"),
        *("routing_policy", "worker_flags", "local_folder", "exec_command"),
        *("kubernetes_scale", "kubernetes_prefill_scale", "kubernetes_namespace"),
    ),
)
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    default="warning",
    envvar="KVROUTE_LOG_LEVEL",
    show_envvar=True,
    show_default=True,
    help="Minimum severity to log.",
    cls=Option,
    heading=COMMON,
)
def up(**values: Any) -> None:
    """Run a cluster on this machine until Ctrl-C."""
    from app.http.keys import Keys, check_open
    from app.local.child import INTERRUPTS, heed_interrupts
    from app.local.cluster import Cluster

    _start_log(values["log_level"])
    engines = parse_engines(values["engine"])
    _check_up(values, engines)
    asking = pick(RouterSettings, values, without=("redis_url", "port"))
    if engines and not asking.worker_key:
        asking = replace(asking, worker_key=values["engine_api_key"])
    keys = Keys(asking.api_key, asking.api_key_file)
    check_open(values["balancer_host"], keys, no_auth=asking.no_auth)
    if values["redis_url"] is not None:
        asyncio.run(_reach(values["redis_url"]))
    heed_interrupts()
    with (
        suppress(KeyboardInterrupt),
        Cluster(
            num_workers=values["num_workers"],
            num_replicas=values["num_replicas"],
            redis_url=values["redis_url"],
            host=values["balancer_host"],
            port=values["port"],
            haproxy=values["haproxy"],
            gateway=values["gateway"],
            router=asking,
            worker=pick(WorkerSettings, values, without=("redis_url", "port")),
            engines=engines,
            agent=_agent_of(values),
            planner=(
                pick(PlannerSettings, values, without=("redis_url", "port"))
                if values["with_planner"]
                else None
            ),
            num_prefill=values["num_prefill"],
            num_decode=values["num_decode"],
        ) as cluster,
    ):
        try:
            click.echo(_listening(cluster))
            _until_stopped(cluster)
        finally:
            # A second signal leaves no process behind either.
            for number in INTERRUPTS:
                signal.signal(number, lambda *_: cluster.kill())
    click.echo("stopped")


def _check_up(values: dict[str, Any], engines: list[str]) -> None:
    """What is better said once here than by each process that cannot start. Raises ConfigError."""
    with extra("worker"):
        importlib.import_module("workers.main")
    if values["with_planner"]:
        with extra("planner"):
            importlib.import_module("app.planner.main")
    if values["gateway"]:
        _check_gateway(values)
    if engines:
        _check_engines(values)
    elif not values["num_workers"] and not (values["with_planner"] and values["wait_queue"]):
        raise ConfigError(
            "workers: 0 needs --planner, which starts one for a request, and --wait-queue, in "
            "which that waits"
        )


def _agent_of(values: dict[str, Any]) -> EngineAgentSettings:
    of_agents = {name: values[name] for name in AGENT_SETTINGS}
    of_agents |= {"model": values["model_name"], "capacity_tokens": values["kv_pool_tokens"]}
    return pick(EngineAgentSettings, of_agents, without=())


def _check_gateway(values: dict[str, Any]) -> None:
    """What a gateway does in the routers' place, they cannot be told to do. Raises ConfigError."""
    with extra("gateway"):
        importlib.import_module("app.gateway.processor")
    given = click.get_current_context().get_parameter_source
    refused = {"haproxy": "--haproxy", "with_planner": "--planner"}
    refused |= {name: f"--{name.replace('_', '-')}" for name in CARRIAGE_SETTINGS if name in values}
    for name, spelt in refused.items():
        if given(name) not in _USUAL and values[name]:
            raise ConfigError(f"{spelt}: not together with --gateway {values['gateway']}")


def _check_engines(values: dict[str, Any]) -> None:
    """Beside engines that run already, nothing else is a worker. Raises ConfigError."""
    given = click.get_current_context().get_parameter_source
    for name, flag in (("num_workers", "--workers"), ("with_planner", "--planner")):
        if values[name] and given(name) not in _USUAL:
            raise ConfigError(f"{flag}: not together with --engine URL, which names the workers")
    values["num_workers"], values["engine"] = 0, "sim"
    if given("num_replicas") in _USUAL:
        values["num_replicas"] = 1


async def _reach(redis_url: str) -> None:
    """Raises RedisUnavailable, and ConfigError for a Redis that cannot be used."""
    from app.state.connect import check_server, connect, naming

    with naming(redis_url):
        async with connect(redis_url, timeout_s=REDIS_TIMEOUT_S) as redis:
            await check_server(redis, REDIS_TIMEOUT_S)


def _inherited(number: int) -> socket.socket:
    """The listening socket with that file descriptor. Raises ConfigError if there is none."""
    try:
        inherited = socket.socket(fileno=number)
        listens = inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"shared_fd {number}: {error.strerror}") from None
    if not listens:
        raise ConfigError(f"shared_fd {number}: the socket is not listening")
    return inherited


def _listening(cluster: Any) -> str:
    from app.state.connect import shown_url

    redis_url = shown_url(cluster.redis_url)
    balancer = "haproxy" if cluster.balancer else "a socket shared by the replicas"
    if cluster.balancer and cluster.balancer.name == "envoy":
        balancer = "envoy, which asks the pickers"
    running = [*cluster.routers, *cluster.workers, *cluster.agents]
    lines = [
        f"balancer   {cluster.balancer_url}   ({balancer})",
        *(f"{m.name:<10} {m.url}" for m in running),
        f"redis      {redis_url}",
        *([f"console    {cluster.console_url}"] if cluster.console_url else []),
        "",
        "Try:",
        f"  {cluster.example()}",
        f"  curl -s {cluster.replica_url}/v1/workers",
        f"  curl -s {cluster.replica_url}/v1/route -H 'content-type: application/json' "
        """-d '{"token_ids": [1, 2, 3], "explain": true, "reserve": false}'""",
        f"  kvroute doctor --redis-url {redis_url} --namespace {cluster.keyspace.namespace}",
        "",
        "Press Ctrl-C to stop.",
    ]
    return "\n".join(lines)


def _until_stopped(cluster: Any) -> None:
    """Wait for SIGINT or SIGTERM; report any process of the cluster that ends before."""
    reported: set[str] = set()
    while True:
        for name, status in cluster.ended().items():
            if name not in reported or name == "planner":
                reported.add(name)
                click.echo(f"{name} exited with status {status}", err=True)
            if name == "planner":
                cluster.start_planner()
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
