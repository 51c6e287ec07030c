"""Asks an engine over HTTP."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from app.core.errors import EngineUnavailable, EngineUnfit, cut, shown
from app.core.limits import MAX_ANSWER_BYTES
from workers.bridge.health import PROBE_S, Probe

DEADLINE_S = 5.0
_NOT_FOUND = (404, 405)


class EngineHttp:
    """The HTTP interface of the engine at `url`.

    session: its headers carry the engine's API key, if it has one.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, deadline_s: float = DEADLINE_S
    ) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._deadline = aiohttp.ClientTimeout(total=deadline_s)

    @property
    def host(self) -> str:
        """Of the URL, as ZMQ addresses want it."""
        host = urlsplit(self.url).hostname or ""
        return f"[{host}]" if ":" in host else host

    async def get(self, path: str) -> bytes | None:
        """The body of the answer; None if the engine has no such path.

        Raises EngineUnavailable if it does not answer in time or answers 5xx, and EngineUnfit if it
        refuses, or its URL is none.
        """
        return await self._ask("GET", path)

    async def probe(self, path: str) -> Probe:
        """What comes of asking whether it is well, which is given its own time."""
        try:
            async with self._session.get(
                f"{self.url}{path}", timeout=aiohttp.ClientTimeout(total=PROBE_S)
            ) as answer:
                status = answer.status
        except aiohttp.ClientConnectorError as error:
            is_refused = isinstance(error.os_error, ConnectionRefusedError)
            return Probe.REFUSED if is_refused else Probe.LATE
        except (aiohttp.ClientError, TimeoutError, OSError):
            return Probe.LATE
        if status == 200 or status in _NOT_FOUND:
            return Probe.ANSWERED
        return Probe.UNWELL if status >= 500 else Probe.DENIED

    async def _ask(self, method: str, path: str, body_json: object = None) -> bytes | None:
        at = f"{self.url}{path}"
        try:
            async with self._session.request(
                method, at, json=body_json, timeout=self._deadline
            ) as answer:
                body = bytearray()
                async for piece in answer.content.iter_any():
                    body += piece
                    if len(body) > MAX_ANSWER_BYTES:
                        raise EngineUnavailable(
                            f"{at} answers with over {MAX_ANSWER_BYTES:,} bytes"
                        )
        except aiohttp.ClientConnectorCertificateError as error:
            why = getattr(error.certificate_error, "verify_message", error.certificate_error)
            raise EngineUnfit(
                f"the certificate of {self.url} is not trusted ({cut(str(why))}): set "
                "SSL_CERT_FILE, of agents and routers, to a file with that of its authority"
            ) from None
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, ValueError):
            raise EngineUnfit(
                f"--engine-url {shown(self.url)} is no http:// or https:// address"
            ) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = str(error) or type(error).__name__
            raise EngineUnavailable(f"{at} does not answer: {cut(why)}") from None
        if answer.status in _NOT_FOUND:
            return None
        if answer.status in (401, 403):
            raise EngineUnfit(f"{at} answers {answer.status}: give the agent --engine-api-key")
        if answer.status != 200:
            raise EngineUnavailable(f"{at} answers {answer.status}")
        return bytes(body)

    async def get_object(self, path: str) -> dict[str, Any] | None:
        """The JSON object in the answer; None if the engine has no such path, or answers something
        else there. Raises as `get` does."""
        return _object(await self.get(path))

    async def post_object(self, path: str, content: object) -> dict[str, Any] | None:
        """As `get_object`, for what is posted there."""
        return _object(await self._ask("POST", path, content))


def _object(body: bytes | None) -> dict[str, Any] | None:
    try:
        answer = orjson.loads(body or b"null")
    except orjson.JSONDecodeError:
        return None
    return answer if isinstance(answer, dict) else None


def whole(value: object) -> int | None:
    """A positive number that an engine says, also as text; None if it says none."""
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number > 0 else None
