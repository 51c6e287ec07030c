"""Asks engines over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp

from app.core.errors import KvrouteError

KEEP_ALIVE_S = 4.0
"""vLLM closes a connection that has been idle for five seconds."""
READ_BYTES = 64 * 1024


class UpstreamError(KvrouteError):
    """An engine did not answer, or not to the end."""


class ConnectFailed(UpstreamError):
    """No connection: nothing of the request has reached the engine."""


class NoAnswer(UpstreamError):
    """The connection ended, or the time, before an answer began."""


class UpstreamBroken(UpstreamError):
    """The connection ended, or the time, in the middle of an answer."""


class Answer:
    """One answer that has begun."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = [(name.lower(), value) for name, value in response.raw_headers]

    async def read(self, between_s: float | None = None) -> bytes:
        """What has come since; b"" at the end. Raises UpstreamBroken."""
        try:
            async with asyncio.timeout(between_s):
                return await self._response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UpstreamBroken(f"broke off: {error or type(error).__name__}") from None

    def abort(self) -> None:
        """Close the connection, unless the answer has ended: the engine then stops."""
        self._response.close()


class Upstream:
    """Keeps connections to engines; `close` it."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=READ_BYTES,
            skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
        )

    async def close(self) -> None:
        await self._session.close()

    async def send(
        self,
        base_url: str,
        path: str,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        *,
        connect_s: float,
        answer_s: float,
    ) -> Answer:
        """Post `body`, and wait for the beginning of the answer. Raises ConnectFailed, NoAnswer."""
        named: Any = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        timeout = aiohttp.ClientTimeout(total=None, connect=connect_s)
        for is_last in (False, True):
            try:
                async with asyncio.timeout(answer_s):
                    response = await self._session.post(
                        f"{base_url.rstrip('/')}{path}",
                        data=body,
                        headers=named,
                        timeout=timeout,
                        allow_redirects=False,
                    )
                    return Answer(response)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                raise ConnectFailed(f"no connection: {error}") from None
            except TimeoutError:
                raise NoAnswer(f"no answer in {answer_s:g} s") from None
            except (aiohttp.ClientError, OSError) as error:
                if is_last or not isinstance(error, aiohttp.ServerDisconnectedError):
                    raise NoAnswer(f"no answer: {error or type(error).__name__}") from None
        raise AssertionError
