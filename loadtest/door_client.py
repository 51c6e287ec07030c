"""One request as an OpenAI client makes it: a single call, and the router does all the rest.

Traces are token ids, not text, so the call is a completion, whose prompt may be ids.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Any, Self

import numpy as np
import orjson

from loadtest.client import (
    NETWORK_ERRORS,
    ROUTER_TIMEOUT_S,
    ClusterClient,
    FailureKind,
    Request,
    RequestError,
    clock,
    described,
    status_error,
    translated_errors,
)

JSON_TYPE = {"Content-Type": "application/json"}


class Api(StrEnum):
    """How requests are made."""

    KVROUTE = "kvroute"
    OPENAI = "openai"


class DoorClient(ClusterClient):
    """A ClusterClient for the first model of a cluster. Policies are its routers' own.

    Outcomes name the worker where routers run with --show-decision; how long decisions took is
    nowhere said.
    """

    async def __aenter__(self) -> Self:
        """Raises RequestError if the cluster has no model."""
        await super().__aenter__()
        try:
            self._model = await self._first_model()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def _first_model(self) -> str:
        url = next(self._base_urls)
        with translated_errors(url):
            async with (
                asyncio.timeout(ROUTER_TIMEOUT_S),
                self._session.get(f"{url}/v1/models") as response,
            ):
                if response.status != 200:
                    raise await status_error(response, FailureKind.UNAVAILABLE)
                cards = orjson.loads(await response.read())["data"]
        if not cards:
            raise RequestError(FailureKind.UNAVAILABLE, f"{url}: no model has a live worker")
        return str(cards[0]["id"])

    async def _attempt(self, request: Request) -> None:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": np.frombuffer(request.prompt, "<u4"),
            "max_tokens": request.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "stream_interval": request.tokens_per_chunk,
        }
        url = next(self._base_urls)
        try:
            async with self._session.post(
                f"{url}/v1/completions",
                data=orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY),
                headers=JSON_TYPE,
            ) as response:
                if response.status != 200:
                    raise await status_error(response, FailureKind.UNAVAILABLE)
                request.worker = response.headers.get("x-kvroute-worker")
                await self._read_answer(response.content, request)
            request.end_s = clock()
            if request.usage is None:
                raise ValueError("answer without usage")
        except (*NETWORK_ERRORS, ValueError) as error:
            is_early = request.first_token_s is None
            kind = FailureKind.UNREACHABLE if is_early else FailureKind.BROKEN_STREAM
            raise RequestError(kind, f"{url}: {described(error)}") from error

    async def _confirm(self, request: Request) -> None:
        """The router sees the first token itself."""
