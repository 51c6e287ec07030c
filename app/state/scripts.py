"""Runner of Calls, any number per round trip: each is a script of lua/, or one Redis command.

A script's header is its contract; Keyspace spells out the names after `KEYS[n]` in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, Generic, TypeVar

from redis.exceptions import NoScriptError, OutOfMemoryError, RedisError

from app.core.errors import KvrouteError, RedisFull, RedisUnavailable
from app.core.keys import Keyspace
from app.state.client import MAX_REDIRECTS, RedisClient
from app.state.connect import deadline
from app.state.records import FIELDS
from app.state.round_trip import Node, did_not_run, round_trip

T = TypeVar("T")

_INCLUDE = re.compile(r"^-- @include (\w+)\n", re.MULTILINE)
_FIELDS = re.compile(r"\{\} -- @fields (\w+)$", re.MULTILINE)
_READS_ONLY = re.compile(r"^-- Cost .*\. Reads only\.$", re.MULTILINE)
_HEADER_KEY = re.compile(r"^-- KEYS\[\d+\] +(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """A file of lua/, with its includes and the names of FIELDS pasted in."""

    name: str
    text: str
    key_names: tuple[str, ...]
    sha: str
    reads_only: bool


@cache
def load_script(name: str) -> Script:
    folder = files("lua")
    raw = (folder / f"{name}.lua").read_text()
    text = _INCLUDE.sub(lambda m: (folder / "lib" / f"{m[1]}.lua").read_text(), raw)
    text = _FIELDS.sub(lambda m: f"{{{', '.join(map(repr, FIELDS[m[1]]))}}}", text)
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    reads_only = _READS_ONLY.search(raw) is not None
    return Script(name, text, tuple(_HEADER_KEY.findall(raw)), sha, reads_only)


@dataclass(slots=True)
class Call(Generic[T]):
    """One run of an operation: its arguments, and the parser of its reply. name: of the operation
    and its script. command: the Redis command, if no script is needed."""

    name: str
    keys: tuple[str, ...]
    args: tuple[Any, ...]
    parse: Callable[[Any], T]
    command: str | None = None

    def words(self) -> tuple[Any, ...]:
        if self.command:
            return (self.command, *self.keys, *self.args)
        sha = load_script(self.name).sha
        return ("EVALSHA", sha, len(self.keys), *self.keys, *self.args)


def call(name: str, keyspace: Keyspace, *args: Any, parse: Callable[[Any], T]) -> Call[T]:
    """Returns a Call of lua/<name>.lua in `keyspace`."""
    return Call(name, _keys(name, keyspace.namespace, keyspace.shard), args, parse)


def command(name: str, command: str, key: str, *args: Any, parse: Callable[[Any], T]) -> Call[T]:
    """Returns a Call of one Redis command on `key`, which is all that the operation `name`
    needs."""
    return Call(name, (key,), args, parse, command)


@lru_cache(maxsize=4096)
def _keys(name: str, namespace: str, shard: int | None) -> tuple[str, ...]:
    keyspace = Keyspace(namespace, shard)
    return tuple(keyspace[key] for key in load_script(name).key_names)


class ScriptRunner:
    """Runner of Calls, each batch within `timeout_s`. on_replicas: scripts, read-only, that run on
    replicas where there are any."""

    def __init__(
        self, redis: RedisClient, timeout_s: float, *, on_replicas: Collection[str] = ()
    ) -> None:
        for name in on_replicas:
            assert load_script(name).reads_only, f"{name} writes"
        self.redis = redis
        self._timeout_s = timeout_s
        self._on_replicas = frozenset(on_replicas)

    async def run(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Returns the parsed replies, in the order of `calls`; one round trip, two after a Redis
        restart.

        In a Cluster the calls to each node are one round trip, and the nodes work in parallel.
        Calls may run in any order: those whose script Redis does not know yet are sent again.
        Raises RedisUnavailable if Redis cannot be reached or does not answer in time; some of the
        calls may then have taken effect.
        """
        replies = await self.run_each(calls)
        for reply in replies:
            if isinstance(reply, KvrouteError):
                raise reply
        return replies

    async def run_each(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Returns the parsed replies, with a RedisUnavailable in place of each missing answer, and
        the error in place of one that its parser refuses. Calls to one node do not wait for another
        node: each node has the whole `timeout_s`."""
        if not calls:
            return []
        until_s = asyncio.get_running_loop().time() + self._timeout_s
        if self.redis.has_nodes:
            replies = await self._replies_of_nodes(calls, until_s)
        else:
            replies = await self._replies(Node(self.redis), calls, until_s)
        return [_parsed(c, reply) for c, reply in zip(calls, replies, strict=True)]

    async def one(self, one: Call[T]) -> T:
        result: T = (await self.run([one]))[0]
        return result

    async def _replies_of_nodes(self, calls: Sequence[Call[Any]], until_s: float) -> list[Any]:
        if self.redis.stale:
            try:
                async with deadline(self._timeout_s):
                    await self.redis.refresh()
            except RedisUnavailable as error:
                return [error] * len(calls)
        groups = _grouped((self._node_of(c), i) for i, c in enumerate(calls))
        if len(groups) == 1:
            (node,) = groups
            return await self._replies(node, calls, until_s)
        replies: list[Any] = [None] * len(calls)

        async def answer(node: Node, which: list[int]) -> None:
            answers = await self._replies(node, [calls[i] for i in which], until_s)
            for i, reply in zip(which, answers, strict=True):
                replies[i] = reply

        async with asyncio.TaskGroup() as tasks:
            for node, which in groups.items():
                tasks.create_task(answer(node, which))
        return replies

    def _node_of(self, one: Call[Any]) -> Node:
        return self.redis.node_of(one.keys[0], replica=one.name in self._on_replicas)

    async def _replies(self, node: Node, calls: Sequence[Call[Any]], until_s: float) -> list[Any]:
        try:
            return await self._ask(node, calls, until_s, MAX_REDIRECTS)
        except TimeoutError:
            why = f"no answer within {self._timeout_s * 1000:.0f} ms"
        except (RedisError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
        self.redis.doubt()
        return [RedisUnavailable(why)] * len(calls)

    async def _ask(
        self, node: Node, calls: Sequence[Call[Any]], until_s: float, redirects: int
    ) -> list[Any]:
        try:
            replies = await self._send(node, calls, until_s)
            missing = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
            if missing:
                await self._evaluate_again(node, calls, replies, missing, until_s)
        except (RedisError, OSError) as error:
            if not node.replica:
                raise
            replies = [error] * len(calls)
        refused = {
            i: reply
            for i, reply in enumerate(replies)
            if isinstance(reply, Exception) and (node.replica or did_not_run(reply))
        }
        if refused and redirects:
            async with asyncio.timeout_at(until_s):
                nodes = await self.redis.redirect(
                    node, {calls[i].keys[0]: reply for i, reply in refused.items()}
                )
            targets = [(nodes.get(calls[i].keys[0]), i) for i in refused]
            for target, which in _grouped((n, i) for n, i in targets if n is not None).items():
                some = [calls[i] for i in which]
                answers = await self._ask(target, some, until_s, redirects - 1)
                for i, reply in zip(which, answers, strict=True):
                    replies[i] = reply
        return replies

    async def _evaluate_again(
        self,
        node: Node,
        calls: Sequence[Call[Any]],
        replies: list[Any],
        missing: Sequence[int],
        until_s: float,
    ) -> None:
        """Sends calls again whose script Redis did not know, and sets their replies. Calls run one
        by one and in order, so what Redis did run stands."""
        texts = [load_script(name).text for name in {calls[i].name for i in missing}]
        for reply in await round_trip(node, [("SCRIPT LOAD", text) for text in texts], until_s):
            if isinstance(reply, Exception):
                raise reply
        again = await self._send(node, [calls[i] for i in missing], until_s)
        for i, reply in zip(missing, again, strict=True):
            replies[i] = reply

    async def _send(self, node: Node, calls: Sequence[Call[Any]], until_s: float) -> list[Any]:
        return await round_trip(node, [c.words() for c in calls], until_s)


def _grouped(pairs: Iterable[tuple[Node, int]]) -> dict[Node, list[int]]:
    groups: dict[Node, list[int]] = {}
    for node, i in pairs:
        groups.setdefault(node, []).append(i)
    return groups


def _parsed(c: Call[Any], reply: Any) -> Any:
    """Returns the parsed reply, or what its parser raises; for an error of Redis (LOADING,
    READONLY, a script that failed), a RedisUnavailable that says which."""
    if not isinstance(reply, Exception):
        try:
            return c.parse(reply)
        except KvrouteError as error:
            return error
    if not isinstance(reply, RedisUnavailable):
        # Before Redis 7, a script's error names the refusal only in its text.
        is_full = isinstance(reply, OutOfMemoryError) or "-OOM command" in str(reply)
        return (RedisFull if is_full else RedisUnavailable)(f"{c.name}: {reply}")
    return reply
