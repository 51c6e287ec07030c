"""One request against a cluster, as a caller makes it: route, stream, confirm, release.

Router calls go through the balancer's URL, the completion straight to the chosen worker:

    POST   /v1/route                            -> worker, its address
    POST   <address>/v1/completions, streamed   -> tokens
    POST   /v1/requests/{id}/prefill_complete   at the first token
    DELETE /v1/requests/{id}                    at the end, whatever happened;
                                                ?worker_failed=true if it was the worker's fault

Prompts travel as raw little-endian u32, which spares both sides JSON.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import cycle
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

import aiohttp
import orjson
import stamina
import stamina.instrumentation

ROUTER_TIMEOUT_S = 5.0
ROUTE_TIMEOUT_S = 30.0
"""Longer than requests wait for a worker by default: giving up earlier loses the place in line."""
CONNECT_TIMEOUT_S = 5.0
CHUNKS_PER_ANSWER = 5
# TimeoutError is an OSError.
NETWORK_ERRORS = (aiohttp.ClientError, OSError)
TOKENS_TYPE = {"Content-Type": "application/octet-stream"}


clock = time.perf_counter  # uvloop's own clock counts whole milliseconds

# Retries are counted in each outcome; a log line for each would break up a progress display.
stamina.instrumentation.set_on_retry_hooks(())


class FailureKind(StrEnum):
    """Why a request has no complete answer."""

    UNREACHABLE = "unreachable"
    """No connection to the balancer, or one that broke before an answer."""
    UNAVAILABLE = "unavailable"
    """408 or 5xx from the router: no live worker, or the balancer found no router."""
    FULL = "full"
    """429: every worker is full."""
    REFUSED = "refused"
    """4xx, or an answer that is not a router's: asking again would not help."""
    WORKER = "worker"
    """The chosen worker gave no first token."""
    BROKEN_STREAM = "broken_stream"
    """The worker's answer ended after its first token and before its usage."""
    DEADLINE = "deadline"


RETRIED = {
    FailureKind.UNREACHABLE,
    FailureKind.UNAVAILABLE,
    FailureKind.FULL,
    FailureKind.WORKER,
}


class RequestError(Exception):
    def __init__(self, kind: FailureKind, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request. Times in seconds since the same start.

    first_token_s and end_s are None unless the answer came in full.
    """

    request_id: str
    arrival_s: float
    """The time when it was due, not when the client got round to it: a slow client hides no
    waiting."""
    sent_s: float
    prompt_tokens: int
    attempts: int
    failure: FailureKind | None = None
    error: str | None = None
    worker: str | None = None
    """`<worker_id>:<dp_rank>` of the last worker chosen."""
    decision_s: float | None = None
    """How long the router took to choose that worker, as seen by the client."""
    degraded: bool = False
    first_token_s: float | None = None
    end_s: float | None = None
    cached_tokens: int = 0
    cached_tokens_by_tier: dict[str, int] = field(default_factory=dict)
    """Empty if the worker does not report it."""
    output_tokens: int = 0


@dataclass(slots=True)
class Request:
    """A request under way, and what has become of it so far."""

    request_id: str
    output_tokens: int
    policy: str | None
    arrival_s: float
    sent_s: float
    prompt: bytes = b""
    attempts: int = 0
    worker: str | None = None
    decision_s: float | None = None
    degraded: bool = False
    first_token_s: float | None = None
    end_s: float | None = None
    usage: dict[str, Any] | None = None
    reservation_id: str | None = None
    failed_worker: str | None = None
    """The worker of the previous attempt, if the worker failed."""
    last_error: RequestError | None = None

    @property
    def came(self) -> dict[str, int]:
        assert self.usage is not None
        told = {"output_tokens": self.usage["completion_tokens"]}
        if self.first_token_s is not None:
            told["ttft_ms"] = max(0, round(1000 * (self.first_token_s - self.sent_s)))
        return told

    @property
    def tokens_per_chunk(self) -> int:
        return max(1, -(-self.output_tokens // CHUNKS_PER_ANSWER))

    def wait_before_retry(self, error: Exception) -> bool | float:
        """stamina's backoff hook: False raises, True backs off, a number is seconds to wait."""
        if not isinstance(error, RequestError) or error.kind not in RETRIED:
            return False
        self.last_error = error
        return True if error.retry_after_s is None else error.retry_after_s

    def outcome(self, failure: FailureKind | None = None, error: str | None = None) -> Outcome:
        is_whole = failure is None
        usage = self.usage if is_whole and self.usage else {}
        details = usage.get("prompt_tokens_details") or {}
        return Outcome(
            request_id=self.request_id,
            arrival_s=self.arrival_s,
            sent_s=self.sent_s,
            prompt_tokens=len(self.prompt) // 4,
            attempts=self.attempts,
            failure=failure,
            error=error,
            worker=self.worker,
            decision_s=self.decision_s,
            degraded=self.degraded,
            first_token_s=self.first_token_s if is_whole else None,
            end_s=self.end_s if is_whole else None,
            cached_tokens=details.get("cached_tokens", 0),
            cached_tokens_by_tier=details.get("cached_tokens_by_tier") or {},
            output_tokens=usage.get("completion_tokens", 0),
        )


class ClusterClient:
    """Sends requests to one cluster; use as an async context manager.

    base_url: of the balancer; if there are several, of router replicas, they get the calls in turn.
    deadline_s: for a whole request, from its arrival. max_in_flight: concurrent requests; any more
    wait, are counted in `num_held_back`, and have the wait included in their times.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        *,
        deadline_s: float = 600.0,
        max_in_flight: int = 512,
    ) -> None:
        urls = [base_url] if isinstance(base_url, str) else base_url
        self._base_urls = cycle(url.rstrip("/") for url in urls)
        self._deadline_s = deadline_s
        self._slots = asyncio.Semaphore(max_in_flight)
        self.num_held_back = 0
        self.num_lost_calls = 0
        """Confirmations and releases that no router accepted."""

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def workers(self) -> list[str]:
        """Names of the workers that are live now. Raises RequestError."""
        base_url = next(self._base_urls)
        with translated_errors(base_url):
            async with (
                asyncio.timeout(ROUTER_TIMEOUT_S),
                self._session.get(f"{base_url}/v1/workers") as response,
            ):
                if response.status != 200:
                    raise await status_error(response, FailureKind.UNAVAILABLE)
                answer = orjson.loads(await response.read())
            return sorted(_worker_name(worker) for worker in answer["workers"])

    async def send(
        self,
        request_id: str,
        make_prompt: Callable[[], bytes],
        *,
        output_tokens: int,
        policy: str | None = None,
        arrival: float | None = None,
    ) -> Outcome:
        """Sends one request, and retries it as long as the failure and the deadline allow.

        make_prompt: called once a slot is free. arrival: when the request was due, on `clock`; now
        if None. The outcome's times are on that clock. Nothing that the cluster causes is raised:
        failures are in the outcome.
        """
        arrival = clock() if arrival is None else arrival
        request = Request(request_id, output_tokens, policy, arrival_s=arrival, sent_s=arrival)
        try:
            async with asyncio.timeout(arrival + self._deadline_s - clock()), self._slot():
                request.prompt = make_prompt()
                request.sent_s = clock()
                async for attempt in stamina.retry_context(
                    on=request.wait_before_retry, attempts=None, timeout=None, wait_jitter=0.1
                ):
                    with attempt:
                        request.attempts = attempt.num
                        await self._attempt(request)
        except TimeoutError:
            late = f"no answer within {self._deadline_s:g} s"
            if request.last_error is not None:
                late += f", last error: {request.last_error}"
            return request.outcome(FailureKind.DEADLINE, late)
        except RequestError as error:
            return request.outcome(error.kind, str(error))
        return request.outcome()

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        self.num_held_back += self._slots.locked()
        async with self._slots:
            yield

    async def _attempt(self, request: Request) -> None:
        try:
            # A lost answer may have left a reservation. The retry, under the same id, finds it.
            address = await self._route(request)
        except asyncio.CancelledError:  # the deadline; the answer may be under way
            await self._tell_router("DELETE", f"/v1/requests/{request.request_id}")
            raise
        ended = f"/v1/requests/{request.reservation_id}"
        try:
            await self._complete(address, request)
            ended += f"?{urlencode(request.came)}"
        except RequestError as error:
            request.failed_worker = request.worker
            if error.kind in (FailureKind.WORKER, FailureKind.BROKEN_STREAM):
                ended += "?worker_failed=true"
            raise
        finally:
            await self._tell_router("DELETE", ended)

    async def _route(self, request: Request) -> str:
        params = {"request_id": request.request_id}
        if request.attempts > 1:
            params["retry"] = "true"
        if request.policy is not None:
            params["policy"] = request.policy
        if request.failed_worker is not None:
            # Excluded only once: it may be the only worker there is.
            params["exclude"], request.failed_worker = request.failed_worker, None
        asked = clock()
        base_url = next(self._base_urls)
        with translated_errors(base_url):
            async with (
                asyncio.timeout(ROUTE_TIMEOUT_S),
                self._session.post(
                    f"{base_url}/v1/route", params=params, data=request.prompt, headers=TOKENS_TYPE
                ) as response,
            ):
                if response.status != 200:
                    raise await status_error(response, FailureKind.UNAVAILABLE)
                choice = orjson.loads(await response.read())
            request.decision_s = clock() - asked
            request.worker = _worker_name(choice)
            request.degraded = choice["degraded"]
            request.reservation_id = choice.get("reservation_id", request.request_id)
            return str(choice["address"])

    async def _complete(self, address: str, request: Request) -> None:
        params = {
            "request_id": request.request_id,
            "max_tokens": str(request.output_tokens),
            "stream": "true",
            "stream_interval": str(request.tokens_per_chunk),
        }
        try:
            async with self._session.post(
                f"{address}/v1/completions",
                params=params,
                data=request.prompt,
                headers=TOKENS_TYPE,
            ) as response:
                if response.status != 200:
                    raise await status_error(response, FailureKind.WORKER)
                await self._read_answer(response.content, request)
            request.end_s = clock()
            if request.usage is None:
                raise ValueError("answer without usage")
        except (*NETWORK_ERRORS, ValueError) as error:
            kind = (
                FailureKind.WORKER if request.first_token_s is None else FailureKind.BROKEN_STREAM
            )
            raise RequestError(kind, f"{address}: {described(error)}") from error

    async def _read_answer(self, stream: aiohttp.StreamReader, request: Request) -> None:
        """Raises ValueError for a chunk that is not JSON or that reports an error."""
        async for line in stream:
            if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
                continue
            chunk = orjson.loads(line[5:])
            if "error" in chunk:
                raise ValueError(str(chunk["error"]))
            if request.first_token_s is None:
                request.first_token_s = clock()
                await self._confirm(request)
            request.usage = chunk.get("usage") or request.usage

    async def _confirm(self, request: Request) -> None:
        await self._tell_router("POST", f"/v1/requests/{request.reservation_id}/prefill_complete")

    async def _tell_router(self, method: str, path: str) -> None:
        """A lost call is counted but fails no request, as reservations expire by themselves."""
        try:
            async with (
                asyncio.timeout(ROUTER_TIMEOUT_S),
                self._session.request(method, next(self._base_urls) + path) as response,
            ):
                self.num_lost_calls += response.status >= 400
                # Leaving its body unread would close the connection, which HAProxy logs.
                await response.read()
        except NETWORK_ERRORS:
            self.num_lost_calls += 1


@contextmanager
def translated_errors(url: str) -> Iterator[None]:
    """Turns whatever can go wrong with a router's answer into RequestError."""
    try:
        yield
    except NETWORK_ERRORS as error:
        raise RequestError(FailureKind.UNREACHABLE, f"{url}: {described(error)}") from error
    except (KeyError, ValueError) as error:
        message = f"{url}: not a router's answer: {error!r}"
        raise RequestError(FailureKind.REFUSED, message) from error


def _worker_name(worker: dict[str, Any]) -> str:
    return f"{worker['worker_id']}:{worker['dp_rank']}"


async def status_error(response: aiohttp.ClientResponse, server_error: FailureKind) -> RequestError:
    """Raises ValueError if Retry-After is not in seconds."""
    message = f"{response.url.origin()}: {response.status} {(await response.text())[:200]}"
    if response.status == 429:
        kind = FailureKind.FULL
    elif response.status == 408 or response.status >= 500:
        kind = server_error
    else:
        kind = FailureKind.REFUSED
    retry_after_s = response.headers.get("Retry-After")
    return RequestError(kind, message, None if retry_after_s is None else float(retry_after_s))


def described(error: BaseException) -> str:
    return f"{type(error).__name__} {error}".rstrip()
