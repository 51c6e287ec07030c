"""The token ids of prompts: known by the client, rendered here, or asked of the engine.

Rendered here, they go along to the engine, which then does not tokenize again: cache and router
cannot disagree. The workers' hash of their tokenizer, and a canary, which compares what is
rendered here with what the engine renders, tell when they would.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from app.core.errors import InvalidRequest, RouterOverloaded, shown
from app.core.hashing import Tokens
from app.door.asked import PROMPTS, Api
from app.door.engines import ids_field
from app.door.errors import ContextTooLong, NotTokenized
from app.door.models import Model
from app.door.tokens import (
    Overloaded,
    Renderer,
    TokenizerUnavailable,
    TooManyTokens,
    Unrenderable,
    chat_of_messages,
    chat_of_response,
    load,
)
from app.door.upstream import Upstream, UpstreamError
from app.http.json_body import Fields

log = logging.getLogger(__name__)

CANARY_EVERY = 1000
"""One in so many prompts rendered here is compared with the engine's, besides the first."""
ENGINE_TIMEOUT_S = 5.0
RELOAD_S = 60.0
"""How long after a failure to load a tokenizer it is tried again."""
MAX_ASKED_BYTES = 256 * 1024
"""Of a prompt whose ids an engine is asked for: it tokenizes where it answers everybody."""
MAX_TOKENIZED_BYTES = 32 * 1024 * 1024
"""Of an engine's answer that lists the ids of a prompt."""
CHARACTERS_PER_TOKEN = 4
"""To estimate the length of prompts whose tokens are not known."""
MAX_CANARIES = 4
"""At once."""


@dataclass(frozen=True, slots=True)
class PromptIds:
    """tokens_from: client, router or engine; or, without ids, `blind:<why>`.

    are_sent: the engine is to take these ids, rather than to tokenize again.
    """

    ids: Tokens | None
    num_tokens: int
    tokens_from: str
    are_sent: bool = False


@dataclass(slots=True)
class _Rendering:
    """What is known about rendering the prompts of one model here."""

    renderer: Renderer | None = None
    loading: asyncio.Task[None] | None = None
    retry_s: float = 0.0
    count: int = 0
    differs: str = ""
    """How its ids differ from the engine's; "": they do not, as far as was seen."""
    why_not: str = "not loaded yet"

    def differ(self, model: Model, how: str) -> None:
        self.differs = how
        log.error("model %s is tokenized by its engine from now on, not here: %s", model.name, how)


class Prompts:
    """Finds the ids of prompts. sources: where the tokenizers of models are, by name, instead of
    where their workers say."""

    def __init__(self, upstream: Upstream, sources: Mapping[str, str], worker_key: str) -> None:
        self._upstream = upstream
        self._sources = sources
        self._headers = [(b"content-type", b"application/json")]
        if worker_key:
            self._headers.append((b"authorization", b"Bearer " + worker_key.encode()))
        self._renderings: dict[tuple[str, str], _Rendering] = {}
        self._canaries: set[asyncio.Task[None]] = set()

    def state(self) -> dict[str, str]:
        """For each model whose prompts are not rendered here, why."""
        return {
            model: rendering.differs or rendering.why_not
            for (_, model), rendering in self._renderings.items()
            if rendering.differs or rendering.renderer is None
        }

    def apart(self) -> dict[str, bool]:
        """For each model whose prompts came, whether its engine gives other ids than are found
        here."""
        differs: dict[str, bool] = {}
        for (_, model), rendering in self._renderings.items():
            differs[model] = bool(rendering.differs) or differs.get(model, False)
        return differs

    async def of(self, api: Api, model: Model, fields: Fields) -> PromptIds:
        """The ids of the prompt in a body. Raises InvalidRequest, RouterOverloaded."""
        if api is Api.COMPLETIONS:
            given = _given_ids(fields.get("prompt"))
            if given is not None:
                return PromptIds(given, len(given), "client")
        try:
            return await self._rendered(api, model, fields)
        except Overloaded as error:
            raise RouterOverloaded(str(error)) from None
        except NotTokenized as error:
            length = sum(fields.size(name) for name in _TEXTS[api])
            return PromptIds(None, max(1, length // CHARACTERS_PER_TOKEN), f"blind:{error.reason}")

    async def _rendered(self, api: Api, model: Model, fields: Mapping[str, Any]) -> PromptIds:
        fields = _converted(api, model, fields)
        rendering = self._of(model)
        renderer = rendering.renderer
        if renderer is not None and not rendering.differs:
            most = max(0, model.max_tokens - 1)
            try:
                if api is Api.COMPLETIONS:
                    text = _one_text(fields.get("prompt"))
                    ids = await renderer.of_text(text, _adds_special(fields), most)
                elif api is Api.RESPONSES:
                    ids = await renderer.of_response(fields, most)
                else:
                    ids = await renderer.of_chat(fields, most)
            except TooManyTokens as error:
                length = f"{error.num_tokens} or more"
                raise ContextTooLong(PROMPTS[api], model.max_tokens, length) from None
            except Unrenderable as error:
                if error.reason in _LEFT_TO_THE_ENGINE:
                    raise NotTokenized(error.reason) from None
            else:
                self._maybe_compare(api, model, fields, rendering, ids)
                return PromptIds(ids, len(ids), "router", are_sent=True)
        asked = await self._ask(api, model, fields)
        return PromptIds(asked, len(asked), "engine")

    def _of(self, model: Model) -> _Rendering:
        source = self._sources.get(model.name) or model.root.tokenizer
        key = (source, model.name)
        rendering = self._renderings.get(key)
        if rendering is None:
            rendering = self._renderings[key] = _Rendering()
        now_s = asyncio.get_running_loop().time()
        if rendering.renderer is None and rendering.loading is None and now_s >= rendering.retry_s:
            rendering.loading = asyncio.create_task(self._load(model, source, rendering))
        return rendering

    async def _load(self, model: Model, source: str, rendering: _Rendering) -> None:
        try:
            if not source:
                raise TokenizerUnavailable("its workers do not say where its tokenizer is")
            renderer = rendering.renderer = await asyncio.to_thread(load, source)
            for worker in model.workers:
                if worker.tokenizer_hash not in ("", renderer.fingerprint):
                    rendering.differ(model, f"that of worker {worker.key} is another one")
                    break
        except TokenizerUnavailable as error:
            rendering.why_not = str(error)
            rendering.retry_s = asyncio.get_running_loop().time() + RELOAD_S
            log.warning("model %s is tokenized by its engine, not here: %s", model.name, error)
        finally:
            rendering.loading = None

    async def _ask(self, api: Api, model: Model, fields: Mapping[str, Any]) -> NDArray[np.uint32]:
        """The ids by the engine's own rendering. Raises NotTokenized."""
        if api is not Api.COMPLETIONS:
            asked = {name: fields[name] for name in _RENDERED if fields.get(name) is not None}
            if _has_media(fields.get("messages")):
                raise NotTokenized("media")
            if api is Api.RESPONSES:
                if any("tool_calls" in message for message in fields["messages"]):
                    raise NotTokenized("message")  # written in another way in chats
                asked["add_special_tokens"] = True
        else:
            asked = {"prompt": _one_text(fields.get("prompt"))}
            if "add_special_tokens" in fields:
                asked["add_special_tokens"] = fields["add_special_tokens"]
        asked["model"] = model.name
        body = _dumps(asked)
        if len(body) > MAX_ASKED_BYTES:
            raise NotTokenized("size")
        try:
            async with asyncio.timeout(ENGINE_TIMEOUT_S):
                answer = await self._upstream.send(
                    model.root.address,
                    "/tokenize",
                    self._headers,
                    body,
                    connect_s=ENGINE_TIMEOUT_S,
                    answer_s=ENGINE_TIMEOUT_S,
                )
                answered, is_all = await answer.read_up_to(MAX_TOKENIZED_BYTES)
        except (UpstreamError, TimeoutError):
            raise NotTokenized("engine") from None
        answer.abort()  # what more there is
        ids = None
        with suppress(ValueError, LookupError, TypeError, InvalidRequest):
            if is_all and answer.status == 200:
                ids = _given_ids(np.array(orjson.loads(answered)["tokens"]))
        if ids is None:
            raise NotTokenized("refused")
        return ids

    def _maybe_compare(
        self,
        api: Api,
        model: Model,
        fields: Mapping[str, Any],
        rendering: _Rendering,
        ids: Tokens,
    ) -> None:
        is_due = rendering.count % CANARY_EVERY == 0
        rendering.count += 1
        if is_due and len(self._canaries) < MAX_CANARIES:
            task = asyncio.create_task(self._compare(api, model, fields, rendering, ids))
            self._canaries.add(task)
            task.add_done_callback(self._canaries.discard)

    async def _compare(
        self,
        api: Api,
        model: Model,
        fields: Mapping[str, Any],
        rendering: _Rendering,
        ids: Tokens,
    ) -> None:
        try:
            theirs = await self._ask(api, model, fields)
        except NotTokenized:
            rendering.count = 0  # compare the next one
            return
        ours = np.asarray(ids)
        if np.array_equal(ours, theirs):
            return
        both = min(len(ours), len(theirs))
        differing = np.flatnonzero(ours[:both] != theirs[:both])
        at = int(differing[0]) if len(differing) else both
        lengths = f"{len(ours)} here, {len(theirs)} there"
        rendering.differ(model, f"its ids differ from the engine's from token {at} on ({lengths})")


_LEFT_TO_THE_ENGINE = ("media", "size")
"""Why a prompt is not even worth asking for."""
_RENDERED = (
    "messages",
    "tools",
    "tool_choice",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template_kwargs",
    "reasoning_effort",
    "documents",
)
"""Members of a chat request that its rendering depends on."""


_CONVERSIONS: Mapping[Api, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    Api.MESSAGES: chat_of_messages,
    Api.RESPONSES: chat_of_response,
}


def _converted(api: Api, model: Model, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body as that of a chat, unless it is of a completion. Raises NotTokenized.

    Only where the ids go along: engines do not all convert alike.
    """
    if api in (Api.CHAT, Api.COMPLETIONS):
        return fields
    convert = _CONVERSIONS.get(api)
    if convert is None or not all(ids_field(api, worker.engine) for worker in model.workers):
        raise NotTokenized(api)
    try:
        return convert(fields)
    except Unrenderable as error:
        raise NotTokenized(error.reason) from None


def _dumps(value: object) -> bytes:
    """Raises InvalidRequest."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:  # what can be read can be written, but for its depth
        raise InvalidRequest("body", f"is nested too deeply: {error}") from None


def _given_ids(prompt: object) -> NDArray[np.uint32] | None:
    """The ids that a client gives as its prompt; None: it gives text. Raises InvalidRequest."""
    if not isinstance(prompt, np.ndarray):
        return None
    if (
        prompt.ndim != 1
        or not len(prompt)
        or prompt.dtype.kind not in "iu"
        or (prompt.dtype.kind == "i" and prompt.min() < 0)
        or prompt.max() >= 2**32
    ):
        raise InvalidRequest("prompt", "not all are token ids, which are integers below 2^32")
    return prompt.astype(np.uint32)


def _one_text(prompt: object) -> str:
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if isinstance(prompt, list):
        raise NotTokenized("batch")
    if not isinstance(prompt, str):
        raise InvalidRequest("prompt", f"must be text or token ids, got {shown(prompt)}")
    return prompt


def _adds_special(fields: Mapping[str, Any]) -> bool:
    return fields.get("add_special_tokens") is not False


def _has_media(messages: object) -> bool:
    if not isinstance(messages, list):
        return False
    contents = [m.get("content") for m in messages if isinstance(m, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") not in ("text", None) for part in parts)


_TEXTS: Mapping[Api, tuple[str, ...]] = {
    Api.CHAT: ("messages", "tools"),
    Api.COMPLETIONS: ("prompt",),
    Api.EMBEDDINGS: ("input", "messages"),
    Api.MESSAGES: ("system", "messages", "tools"),
    Api.RERANK: ("query", "documents"),
    Api.RESPONSES: ("instructions", "input", "tools"),
    Api.SCORE: ("text_1", "text_2"),
}
"""What of a body the engine makes the prompt of."""
