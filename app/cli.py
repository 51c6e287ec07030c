"""The `kvroute` command. Subcommands import what they need when called."""

from __future__ import annotations

import importlib
import os
import signal
import socket
from contextlib import nullcontext, suppress
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import click

from app.config_file import FILE, read_again, start_log, with_config_file
from app.core.errors import ConfigError, MissingPackage
from app.core.extras import extra
from app.core.keys import Keyspace
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import CommonSettings
from app.core.settings.planner import PlannerSettings
from app.core.settings.router import CARRIAGE_SETTINGS, PickerSettings, RouterSettings
from app.core.settings.worker import WorkerSettings
from app.options import Command, Group, options

S = TypeVar("S", bound=CommonSettings)


def _end_when_told() -> None:
    """End at once if told to stop before the server takes SIGTERM and SIGINT over.

    As process 1 of a container, one without a handler would start all the same, and serve until it
    is killed.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


def _begin(settings: S) -> S:
    """Start a process's log. Raises ConfigError for a bad namespace, before a port is taken."""
    _end_when_told()
    start_log(settings.log_level)
    Keyspace(settings.namespace)
    return settings


class _LazyGroup(Group):
    """A group with commands of other modules, of which it lists those whose extra is installed.

    lazy: module of each command, by name. extras: extra that the module needs, if any.
    """

    lazy: ClassVar[dict[str, str]] = {}
    extras: ClassVar[dict[str, str]] = {}

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
        "up": "app.up",
        "inspect": "app.ops.inspect",
        "doctor": "app.ops.doctor",
        "drain": "app.ops.drain",
        "explain": "app.ops.explain",
        "whatif": "app.ops.explain",
        "reset": "app.ops.namespaces",
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
    settings = _begin(RouterSettings(**values))
    from app.edge.app import serve_router
    from app.http.server import listen, run

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
    settings = _begin(_picker_settings(values))
    from app.http.server import listen, run

    with extra("gateway"):
        from app.gateway.processor import serve
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
    settings = _begin(WorkerSettings(**values))
    from app.http.server import run

    with extra("worker"):
        from workers.main import serve
    run(serve(settings))


@main.command(cls=Command)
@with_config_file
@options(EngineAgentSettings)
def agent(**values: Any) -> None:
    """Run beside an engine, such as vLLM or SGLang, and make it a worker."""
    settings = _begin(EngineAgentSettings(**values))
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
    settings = _begin(PlannerSettings(**values))
    from app.http.server import run

    with extra("planner"):
        from app.planner.main import serve
    run(serve(settings))


def _inherited(number: int) -> socket.socket:
    """Returns the listening socket with that file descriptor. Raises ConfigError."""
    try:
        inherited = socket.socket(fileno=number)
        listens = inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"shared_fd {number}: {error.strerror}") from None
    if not listens:
        raise ConfigError(f"shared_fd {number}: the socket is not listening")
    return inherited


if __name__ == "__main__":
    main()
