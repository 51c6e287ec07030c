"""Sends hostile inputs to what listens at a URL, and finds what should not have come back."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import httptools
import httpx

from app.core.settings.router import RouterSettings
from tests.attack.engine import num_asked
from tests.attack.hostile_bodies import hostile_bodies
from tests.attack.inputs import NO_KEY, Hostile, Surface, hostile, named, request
from tests.eventually import eventually
from tests.fakes.engine import RESET
from tests.fakes.faults import ENDLESS, RAW

CONNECTIONS = 16
"""Open at once; those on which the server waits for the rest of a request come on top."""
SLOW_S = 0.5
LARGEST, OTHERS = 15_000_000, 100_000
"""Bytes of bodies that are never sent to their ends, and of others' beside them."""
UNFINISHED, UNFINISHED_S = 24, 5.0
"""Uploads at once, and how long they are held."""
PATIENCE_S = 40.0
"""Servers wait for 30 s at most."""
PROBE_INTERVAL_S = 0.1
PROBE_TIMEOUT_S = 5.0


@dataclass(slots=True)
class HostileAnswer:
    status: int
    body: bytes = b""
    complete: bool = False

    @property
    def code(self):
        """The code of an error in our own shape, or its type where a client expects no code."""
        try:
            error = json.loads(self.body)["error"]
            return str(error.get("code") or error["type"])
        except (ValueError, KeyError, TypeError, AttributeError):  # a response's error is null
            return None

    @property
    def message(self):
        """The text of an error for people; "": the error has another shape."""
        try:
            return str(json.loads(self.body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return ""


class Answers:
    """Reads what comes back on one connection; raises what is not HTTP."""

    def __init__(self):
        self.seen = []
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data):
        self._parser.feed_data(data)

    def on_headers_complete(self):
        self.seen.append(HostileAnswer(self._parser.get_status_code()))

    def on_body(self, body):
        self.seen[-1].body += body

    def on_message_complete(self):
        self.seen[-1].complete = True
        if self.seen[-1].status == 100:
            self.seen.pop()


async def exchange(address, sent, patience_s):
    """Returns the answers of a connection. Raises HttpParserError if that is not HTTP."""
    answers = Answers()
    reader, writer = await asyncio.open_connection(*address)
    writing = asyncio.create_task(_write(writer, sent.parts))
    try:
        if sent.ending in ("hang up", "reset"):
            await writing
            if sent.ending == "reset":
                raw = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            return []
        if sent.ending == "half-close":
            await writing
            with suppress(OSError):
                writer.write_eof()
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(patience_s if sent.ending == "wait" else PATIENCE_S):
                while data := await reader.read(1 << 16):
                    answers.feed(data)
        return answers.seen
    finally:
        writing.cancel()
        writer.close()
        with suppress(ConnectionError, asyncio.CancelledError):
            await writing
        with suppress(ConnectionError):
            await writer.wait_closed()


async def _write(writer, parts):
    with suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)


@dataclass(slots=True)
class Target:
    name: str
    url: str
    surface: Surface

    @property
    def address(self):
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0


@dataclass(slots=True)
class Attack:
    """Sends inputs to all targets in turn, and notes what should not have come back.

    codes: of errors; none: any. key: that the targets ask for; "": none. other_key: another one.
    """

    targets: Sequence[Target]
    codes: Collection[str] = ()
    key: str = ""
    other_key: str = ""
    seed: int = 1
    problems: list[str] = field(default_factory=list)
    tally: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    async def send(self, first, count, patience_s):
        """patience_s: how long to wait for servers that wait for the rest of a request."""
        numbers = iter(range(first, first + count))
        async with asyncio.TaskGroup() as group:

            async def some():
                for number in numbers:
                    target = self.targets[number % len(self.targets)]
                    sent = hostile(self.seed, number, target.surface)
                    one = group.create_task(
                        self._try_one(f"input {number}", target, sent, patience_s)
                    )
                    await asyncio.wait([one], timeout=SLOW_S)

            for _ in range(CONNECTIONS):
                group.create_task(some())

    async def send_named(self):
        for target in self.targets:
            if target.surface.model:
                for sent in named(target.surface, self.key):
                    await self._try_one("named", target, sent, SLOW_S)

    async def send_unfinished(self):
        """Many uploads at once that never end. The target must go on answering others, and take
        bodies of theirs."""
        for target in self.targets:
            path = target.surface.upload_path
            upload = request("POST", path, b" " * LARGEST)[: -LARGEST // 2]
            # 413: the path takes less.
            statuses = (408, 413, 503)
            sent = Hostile((upload,), "wait", kind="many unfinished uploads", statuses=statuses)
            tries = [
                self._try_one("unfinished", target, sent, UNFINISHED_S) for _ in range(UNFINISHED)
            ]
            others = replace(self, key=self.other_key or self.key)
            await asyncio.gather(*tries, others._upload_meanwhile(target, path))

    async def _upload_meanwhile(self, target, path):
        """Bodies that are not small, while others upload all that they may."""
        statuses = (200, 400, 404, 422, 429)
        sent = Hostile((request("POST", path, b" " * OTHERS + b"{}"),), statuses=statuses)
        sent = replace(sent, kind="a body beside many uploads")
        for number in range(5):
            await asyncio.sleep(UNFINISHED_S / 8)
            await self._try_one(f"other {number}", target, sent, UNFINISHED_S)

    async def send_largest(self):
        """Bodies as large as a router takes."""
        for name, body in hostile_bodies(RouterSettings().max_request_bytes):
            for target in self.targets:
                path = sorted(target.surface.bodies)[-1]
                sent = Hostile((request("POST", path, body),), kind="largest")
                await self._try_one(f"body {name!r}", target, sent, PATIENCE_S)

    async def _try_one(self, what, target, sent, patience_s):
        if self.key and sent.kind != NO_KEY:
            sent = replace(sent, parts=tuple(_with_key(part, self.key) for part in sent.parts))
        try:
            answers = await exchange(target.address, sent, patience_s)
        except (httptools.HttpParserError, OSError) as error:
            answers, wrong = [], [repr(error)]
        else:
            wrong = list(self._wrong(target, sent, answers))
        outcome = " ".join(sorted({str(a.status) for a in answers})) or sent.ending
        self.tally[target.name, sent.kind, outcome] += 1
        for each in wrong:
            begin = b"".join(sent.parts)[:200]
            self.problems.append(f"{target.name}: {sent.kind}, {what}: {each}; sent {begin!r}")

    def _wrong(self, target, sent, answers):
        if sent.ending in ("read", "half-close") and not answers:
            yield "no answer"
        for answer in answers:
            shown = f"{answer.status} {answer.body[:200]!r}"
            if sent.statuses and answer.status not in sent.statuses:
                yield f"instead of {sorted(sent.statuses)}: {shown}"
            excluded = answer.code == "no_workers" and sent.may_exclude_all
            if answer.status >= 500 and answer.status not in sent.statuses and not excluded:
                yield shown
            # HAProxy answers in its own words what it cannot read.
            by_haproxy = answer.body.startswith(b"<html>")
            is_told = by_haproxy or not answer.body or self._is_known(answer.code)
            if answer.status >= 400 and not is_told:
                yield f"an error of another shape: {shown}"
            if answer.status >= 400 and not answer.message.isprintable():
                yield f"an error that terminals obey: {shown}"

    def _is_known(self, code):
        return code in self.codes if self.codes else code is not None


def _with_key(part, key):
    """A part of a request with the key among its headers, if that is where it begins."""
    return part.replace(b"\r\nhost: kvroute\r\n", b"\r\nhost: kvroute\r\n" + _bearer(key), 1)


def _bearer(key):
    return b"authorization: Bearer %b\r\n" % key.encode()


@asynccontextmanager
async def answering(urls, problems):
    """Meanwhile, each of the URLs must answer with 200."""

    async def ask():
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S) as http:
            for url in itertools.cycle(urls):
                try:
                    answer = await http.get(url, headers={"connection": "close"})
                    if answer.status_code != 200:
                        problems.append(f"{url}: {answer.status_code} {answer.text}")
                except httpx.HTTPError as error:
                    problems.append(f"{url}: {error!r}")
                await asyncio.sleep(PROBE_INTERVAL_S)

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking


async def attack_from(engine, model, door, problems):
    """Have the engine answer as none should. It is the only one of `model` behind `door`."""

    async def ask(how, *, streams=False):
        body = {"model": model, "prompt": [1, 2, 3], "user": how, "stream": streams}
        async with door.stream("POST", "/v1/completions", json=body) as answer:
            if how in ENDLESS and answer.status_code == 200:
                return 200, ""  # a client that has had enough
            return answer.status_code, (await answer.aread()).decode()

    for how, streams in itertools.product((*RAW, "resets"), (False, True)):
        try:
            status, text = await ask(how, streams=streams)
            wrong = status not in (200, 204, 502) or '"code":"internal"' in text
            if how.startswith("usage"):
                wrong = wrong or status != 200 or "hello" not in text
            if wrong:
                problems.append(f"engine: {how}: {status} {text[:200]}")
            # A worker that failed gets nothing for a while.
            await eventually(lambda: ask("good"), lambda answer: answer[0] == 200)
        except (AssertionError, httpx.HTTPError, UnicodeDecodeError) as error:
            problems.append(f"engine: {how}: {error!r}")
    if (times := num_asked(engine, "resets")) > 4:
        problems.append(f"engine: two requests were carried out {times} times")
