"""The `kvroute` command. Subcommands import what they need when called."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import socket
import time
from contextlib import suppress
from typing import Any, ClassVar, NoReturn

import click

from app.config_file import FILE, read_again, with_config_file
from app.core.agent_settings import EngineAgentSettings
from app.core.errors import ConfigError
from app.core.keys import Keyspace
from app.core.planner_settings import PlannerSettings
from app.core.router_settings import RouterSettings
from app.core.settings import COMMON, LOG_LEVELS, base_url
from app.core.worker_settings import WorkerSettings
from app.environment import unknown_variables
from app.options import CLUSTER, PORT, Command, Group, Option, cluster_size, options, pick
from app.output import ErrHandler

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
POLL_S = 0.5
REDIS_TIMEOUT_S = 5.0


def _start_log(level: str) -> None:
    """Log from now on, and first of variables that somebody may have misspelt."""
    logging.basicConfig(level=level.upper(), format=LOG_FORMAT, handlers=[ErrHandler()])
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

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *filter(self._is_installed, self.lazy)])

    def _is_installed(self, name: str) -> bool:
        with suppress(ModuleNotFoundError):
            importlib.import_module(self.lazy[name])
            return True
        return False

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        try:
            module = importlib.import_module(self.lazy[cmd_name])
        except ModuleNotFoundError as error:
            _needs("loadtest", error)
        command: click.Command = getattr(module, cmd_name)
        return command


class _Main(_LazyGroup):
    lazy: ClassVar = {
        "replay": "loadtest.replay",
        "demo": "loadtest.demo",
        "inspect": "app.ops.inspect",
        "doctor": "app.ops.doctor",
        "drain": "app.ops.drain",
        "dump": "app.ops.dump",
        "explain": "app.ops.explain",
        "whatif": "app.ops.explain",
        "restore": "app.ops.restore",
        "reset": "app.ops.reset",
        "top": "app.console.top",
    }


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
    host, port = sockets[0].getsockname()[:2]
    url = base_url(host, port)
    if settings.tls_cert:
        url = url.replace("http:", "https:", 1)
    logging.getLogger("kvroute").info("router listening on %s", url)
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
@options(WorkerSettings)
def worker(**values: Any) -> None:
    """Run one worker: an engine and the agent that publishes its cache and load."""
    _end_when_told()
    settings = WorkerSettings(**values)
    _start_log(settings.log_level)
    from app.http.server import run

    try:
        from workers.main import serve

        run(serve(settings))
    except ModuleNotFoundError as error:  # torch is imported only by the engine that needs it
        _needs("torch" if error.name in ("torch", "safetensors") else "worker", error)


@main.command(cls=Command)
@with_config_file
@options(EngineAgentSettings)
def agent(**values: Any) -> None:
    """Run beside an engine, such as vLLM or SGLang, and make it a worker."""
    _end_when_told()
    settings = EngineAgentSettings(**values)
    _start_log(settings.log_level)
    from app.http.server import run

    try:
        from workers.engine_agent import serve
    except ModuleNotFoundError as error:
        _needs("worker", error)
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

    try:
        from app.planner.main import serve

        run(serve(settings))
    except ModuleNotFoundError as error:
        _needs("planner", error)


@main.command(cls=Command)
@with_config_file
@cluster_size(least_workers=0)
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
@options(
    RouterSettings,
    without=("redis_url", "port", "shared_fd", "log_level", "tls_cert", "tls_key"),
)
@options(
    WorkerSettings,
    without=(
        *("redis_url", "namespace", "host", "log_level", "port", "worker_id", "address"),
        *("publish_events", "events_port", "replay_port", "worker_key", "metrics_key"),
        *("role", "kv_port"),
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
        *("routing_policy", "count_in_flight", "worker_flags", "local_folder", "exec_command"),
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
    from app.local.cluster import Cluster
    from app.local.interrupts import INTERRUPTS, heed_interrupts

    _start_log(values["log_level"])
    if not values["num_workers"] and not (values["with_planner"] and values["wait_queue"]):
        raise ConfigError(
            "workers: 0 needs --planner, which starts one for a request, and --wait-queue, in "
            "which that waits"
        )
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
            router=pick(RouterSettings, values, without=("redis_url", "port")),
            worker=pick(WorkerSettings, values, without=("redis_url", "port")),
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
            # Stopping takes a moment; impatience must not leave processes behind.
            for number in INTERRUPTS:
                signal.signal(number, signal.SIG_IGN)
    click.echo("stopped")


async def _reach(redis_url: str) -> None:
    """Raises RedisUnavailable, and ConfigError for a Redis that cannot be used."""
    from app.state.connect import check_server, connect, naming

    with naming(redis_url):
        async with connect(redis_url, timeout_s=REDIS_TIMEOUT_S) as redis:
            await check_server(redis, REDIS_TIMEOUT_S)


def _inherited(number: int) -> socket.socket:
    """The listening socket with that file descriptor. Raises ConfigError if there is none."""
    try:
        found = socket.socket(fileno=number)
        listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"shared_fd {number}: {error.strerror}") from None
    if not listens:
        raise ConfigError(f"shared_fd {number}: the socket is not listening")
    return found


def _listening(cluster: Any) -> str:
    from app.state.connect import shown_url

    redis_url = shown_url(cluster.redis_url)
    balancer = "haproxy" if cluster.balancer else "a socket shared by the replicas"
    if cluster.takes_text:
        path, asked = "chat/completions", '"messages": [{"role": "user", "content": "hi"}]'
    else:
        path, asked = "completions", '"prompt": [1, 2, 3]'
    lines = [
        f"balancer   {cluster.balancer_url}   ({balancer})",
        *(f"{m.name:<10} {m.url}" for m in [*cluster.routers, *cluster.workers]),
        f"redis      {redis_url}",
        *([f"console    {cluster.console_url}"] if cluster.console_url else []),
        "",
        "Try:",
        f"  curl -s {cluster.balancer_url}/v1/{path} "
        f"""-d '{{"model": "{cluster.model}", {asked}}}'""",
        f"  curl -s {cluster.balancer_url}/v1/workers",
        f"  curl -s {cluster.balancer_url}/v1/route -H 'content-type: application/json' "
        """-d '{"token_ids": [1, 2, 3], "explain": true, "reserve": false}'""",
        f"  redis-cli -u {redis_url} HGETALL '{cluster.keyspace['load']}'",
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


def _needs(extra: str, error: ModuleNotFoundError) -> NoReturn:
    raise click.ClickException(
        f"{error.name} is missing: in a checkout of kvroute, run pip install '.[{extra}]'"
    )


if __name__ == "__main__":
    main()
