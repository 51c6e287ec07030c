"""Loads lua/ and runs its scripts: one Call a script run, any number of Calls a round trip.

A script's header is its contract; the names behind `KEYS[n]` in it are what Keyspace spells.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Generic, TypeVar

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from app.core.errors import RedisUnavailable
from app.core.keys import Keyspace
from app.core.redis import deadline

T = TypeVar("T")

_INCLUDE = re.compile(r"^-- @include (\w+)\n", re.MULTILINE)
_HEADER_KEY = re.compile(r"^-- KEYS\[\d+\] +(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """One file of lua/, with its includes pasted in."""

    name: str
    text: str
    key_names: tuple[str, ...]
    sha: str


@cache
def load_script(name: str) -> Script:
    """The script lua/<name>.lua."""
    folder = files("lua")
    raw = (folder / f"{name}.lua").read_text()
    text = _INCLUDE.sub(lambda m: (folder / "lib" / f"{m[1]}.lua").read_text(), raw)
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Script(name, text, tuple(_HEADER_KEY.findall(raw)), sha)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One run of a script: what goes in, and how to read what comes out."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[Any, ...]
    parse: Callable[[Any], T]


def call(name: str, keyspace: Keyspace, *args: Any, parse: Callable[[Any], T]) -> Call[T]:
    """A Call of lua/<name>.lua in `keyspace`."""
    script = load_script(name)
    return Call(script, tuple(keyspace[key] for key in script.key_names), args, parse)


class ScriptRunner:
    """Runs Calls against one Redis, each batch within `timeout_s`."""

    def __init__(self, redis: Redis, timeout_s: float) -> None:
        self.redis = redis
        self._timeout_s = timeout_s

    async def run(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """The parsed replies, in the order of `calls`; one round trip, two after a Redis restart.

        Raises RedisUnavailable if Redis cannot be reached or does not answer in time: then some of
        the calls may have taken effect.
        """
        async with deadline(self._timeout_s):
            replies = await self._send(calls)
            missing = [i for i, r in enumerate(replies) if isinstance(r, NoScriptError)]
            if missing:
                # Runs of scripts are single and ordered, so what Redis did run stands; only the
                # runs that it had no script for are sent again.
                await self._load([calls[i].script for i in missing])
                again = await self._send([calls[i] for i in missing])
                for i, reply in zip(missing, again, strict=True):
                    replies[i] = reply
        return [c.parse(_checked(c, reply)) for c, reply in zip(calls, replies, strict=True)]

    async def one(self, one: Call[T]) -> T:
        """`run` for a single call."""
        result: T = (await self.run([one]))[0]
        return result

    async def _send(self, calls: Sequence[Call[Any]]) -> list[Any]:
        async with self.redis.pipeline(transaction=False) as pipe:
            for c in calls:
                pipe.evalsha(c.script.sha, len(c.keys), *c.keys, *c.args)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
            return replies

    async def _load(self, scripts: Sequence[Script]) -> None:
        for script in set(scripts):
            await self.redis.script_load(script.text)


def _checked(c: Call[Any], reply: Any) -> Any:
    """The reply, if it is none of Redis's errors (LOADING, READONLY, OOM, a script that failed)."""
    if isinstance(reply, RedisError):
        raise RedisUnavailable(f"{c.script.name}: {reply}")
    return reply
