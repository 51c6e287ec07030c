"""Asks an engine over HTTP, also for the models that it serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from app.core.errors import EngineUnavailable, EngineUnfit, cut, shown
from app.core.hashing import PROBE, hash_of_probe
from app.core.limits import MAX_ANSWER_BYTES
from app.core.settings.agent import EngineAgentSettings
from workers.bridge.health import PROBE_S, Probe

DEADLINE_S = 5.0
_NOT_FOUND = (404, 405)


def zmq_host(url: str) -> str:
    """Returns the host of a URL as ZMQ addresses want it."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host


class EngineHttp:
    """HTTP interface of the engine at `url`.

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
        return zmq_host(self.url)

    async def get(self, path: str) -> bytes | None:
        """Returns the body of the answer; None if the engine has no such path. Raises
        EngineUnavailable if it does not answer in time or answers 5xx, and EngineUnfit if it
        refuses, or its URL is none."""
        return await self._ask("GET", path)

    async def probe(self, path: str) -> Probe:
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
        """Returns the JSON object in the answer; None if the engine has no such path, or answers
        something else there. Raises EngineUnavailable and EngineUnfit."""
        return _object(await self.get(path))

    async def post_object(self, path: str, content: object) -> dict[str, Any] | None:
        """Returns the JSON object in the answer; None if there is none. Raises EngineUnavailable
        and EngineUnfit."""
        return _object(await self._ask("POST", path, content))


def _object(body: bytes | None) -> dict[str, Any] | None:
    try:
        answer = orjson.loads(body or b"null")
    except orjson.JSONDecodeError:
        return None
    return answer if isinstance(answer, dict) else None


def whole(value: object) -> int | None:
    """Returns a positive number that an engine says, also as text; None if it says none."""
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number > 0 else None


@dataclass(frozen=True, slots=True)
class EngineModels:
    """Models that an engine lists, with the fields of EngineFacts. owner: of the first, as it says;
    "": it does not."""

    names: tuple[str, ...]
    adapters: tuple[str, ...]
    folders: tuple[tuple[str, str], ...]
    max_model_len: int | None
    tokenizer: str
    owner: str = ""


async def models_of(engine: EngineHttp, given: EngineAgentSettings) -> EngineModels:
    """Returns what /v1/models lists; adapters come and go while the engine runs. Raises
    EngineUnavailable, and EngineUnfit if there is no model and `given` names none."""
    answer = await engine.get_object("/v1/models") or {}
    listed = answer.get("data")
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    own = [card for card in cards if not card.get("parent")]
    names = tuple(filter(None, given.model.split(","))) or tuple(
        str(card["id"]) for card in own if card.get("id")
    )
    if not names:
        raise EngineUnfit("the engine lists no model at /v1/models: give the agent --model NAME")
    adapters = [card for card in cards if card.get("parent") and card.get("id")]
    lengths = [length for card in own if (length := whole(card.get("max_model_len")))]
    return EngineModels(
        names,
        tuple(str(card["id"]) for card in adapters),
        tuple((str(card["id"]), str(card["root"])) for card in adapters if card.get("root")),
        min(lengths, default=None),
        next((str(card["root"]) for card in own if card.get("root")), ""),
        next((str(card["owned_by"]) for card in own if card.get("owned_by")), ""),
    )


async def tokenizer_hash(engine: EngineHttp, model: str) -> str:
    """Returns the hash of the ids that the engine gives for PROBE; "" if it does not say."""
    answer = await engine.post_object("/tokenize", {"model": model, "prompt": PROBE})
    ids = (answer or {}).get("tokens")
    return hash_of_probe(ids) if isinstance(ids, list) and ids else ""
