"""`kvroute top`: the console on a terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import click
import orjson
from rich.console import Console
from rich.live import Live
from rich.text import Text

from app.console.screen import Choices, screen
from app.core.printable import printable
from app.options import BASE_URL, POSITIVE_SECONDS, Command

QUESTIONS = ("overview", "workers", "decisions")
TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 1 << 24
WIDTH = 80
KEY_S = 0.25
ARROWS = {"[A": "up", "[B": "down", "[C": "right", "[D": "left"}
Keys = Callable[[], str]


@click.command(cls=Command)
@click.option(
    "--router-url",
    default="http://127.0.0.1:8080",
    show_default=True,
    type=BASE_URL,
    help="Base URL of any router, or of the balancer in front of all.",
)
@click.option(
    "--api-key",
    default="",
    envvar="KVROUTE_API_KEY",
    show_envvar=True,
    help="An operator's key, where keys are on.",
)
@click.option(
    "--interval-s", default=1.0, show_default=True, type=POSITIVE_SECONDS, help="How often to ask."
)
@click.option("--once", is_flag=True, help="Print all of it once, and end.")
def top(router_url: str, api_key: str, interval_s: float, once: bool) -> None:
    """Show the overview, the workers and the newest decisions, as the console's page does.

    q ends it, left and right choose what workers are sorted by, r reverses, up and down scroll.
    """
    if once:
        console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
        console.print(screen(ask(router_url, api_key), Choices(), None))
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("needs a terminal, or --once")
    with _keys() as key:
        _watch(lambda: ask(router_url, api_key), key, interval_s)


def _watch(look: Callable[[], Mapping[str, Any]], key: Keys, interval_s: float) -> None:
    choices, answers, due_s = Choices(), look(), time.monotonic() + interval_s
    said = ""
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            body: Any = screen(answers, choices, live.console.height - bool(said))
            if said:
                body.renderables.insert(0, Text(f"not new: {printable(said)}", style="red"))
            live.update(body, refresh=True)
            pressed = key()
            if pressed == "q":
                return
            choices = choices.after(pressed)
            if time.monotonic() >= due_s:
                try:
                    answers, said = look(), ""
                except click.ClickException as error:
                    said = error.message
                due_s = time.monotonic() + interval_s


def ask(url: str, api_key: str) -> dict[str, Any]:
    """The answer to each of QUESTIONS. Raises ClickException."""
    return {name: _get(f"{url.rstrip('/')}/console/api/{name}", api_key) for name in QUESTIONS}


def _get(url: str, api_key: str) -> Any:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    direct = build_opener(ProxyHandler({}))
    try:
        with direct.open(Request(url, headers=headers), timeout=TIMEOUT_S) as answer:  # noqa: S310
            return orjson.loads(answer.read(MAX_ANSWER_BYTES))
    except HTTPError as error:
        raise click.ClickException(f"{url}: {error.code} {_message(error.read(4096))}") from None
    except (HTTPException, OSError, ValueError) as error:
        raise click.ClickException(f"{url}: {error or type(error).__name__}") from None


def _message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""


@contextmanager
def _keys() -> Iterator[Keys]:
    """What is pressed within KEY_S: a letter, an arrow's name, or ""."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed() -> str:
        ready, _, _ = select.select([terminal], [], [], KEY_S)
        typed = os.read(terminal, 8).decode(errors="replace") if ready else ""
        return ARROWS.get(typed[1:], "") if typed.startswith("\x1b") else typed[:1]

    try:
        tty.setcbreak(terminal)
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
