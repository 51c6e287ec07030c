"""The token ids of prompts: known by the client, rendered here, or asked of the engine.

Rendered here, they go along to the engine, which then does not tokenize again: cache and router
cannot disagree. The workers' hash of their tokenizer, and a canary, which compares what is
rendered here with what the engine renders, tell when they would.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.core.errors import RouterOverloaded
from app.core.hashing import Tokens
from app.door.answer_request import PROMPTS, Api, given_ids, prompt_sizes
from app.door.engine.upstream import Upstream
from app.door.errors import ContextTooLong, NotTokenized
from app.door.model import Model
from app.door.prompts.engine_tokens import EngineTokens
from app.door.prompts.rendering import (
    LEFT_TO_THE_ENGINE,
    MEDIA,
    TEXTS,
    converted,
    question,
    render,
    trail,
)
from app.door.prompts.tokenizers import NOT_LOADED, LoadedTokenizer, Tokenizers
from app.http.json_body import Fields
from app.http.supervisor import Beside
from app.tokens import (
    Overloaded,
    Renderer,
    TooManyTokens,
    Unrenderable,
)
from app.tokens.media import CHARACTERS_PER_TOKEN, Media, MediaTokens, media_in

log = logging.getLogger(__name__)

COMPARED = 1000
"""One in so many prompts rendered here is compared with an engine's, besides the first."""
MAX_COMPARING = 4
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0
"""Seconds until a model is compared again that is rendered in another way here; twice as long each
time."""
MAX_SOURCES = 4
"""Places that workers of one model name, where its tokenizer is looked for."""
UNUSED_S = 3600.0
"""Seconds after which nothing is kept of rendering a model's prompts."""
TEMPLATE_TOKENS = 256
"""Tokens that a template puts around a chat at most, besides those of the body's own JSON."""


@dataclass(slots=True)
class PromptIds:
    """tokens_from: client, router or engine; or, without ids, `blind:<why>`.

    are_sent: the engine is to take these ids, rather than to tokenize again. part_tokens: of the
    longest prompt, where there are several, of which num_tokens is the sum; 0: there is one. bound:
    without ids, more tokens than any of them has; None: nobody can tell. trail: without ids, the
    names of its text's prefixes, the longest first. media: without ids, what of it is no text.
    """

    ids: Tokens | None
    num_tokens: int
    tokens_from: str
    are_sent: bool = False
    bound: int | None = None
    trail: Sequence[str] = ()
    media: Media | None = None
    part_tokens: int = 0


@dataclass(slots=True)
class _Rendering:
    """State of rendering one model's prompts here.

    model: of whose workers the renderer is. tokenizers: that were looked at. why_not: why there is
    no renderer. is_other: workers have another one. differs: how ids differ from an engine's; "":
    they do not, as far as was seen. again_s: when the next comparison is due.
    """

    model: Model | None = None
    tokenizers: list[LoadedTokenizer] = field(default_factory=list)
    renderer: Renderer | None = None
    why_not: str = NOT_LOADED
    is_other: bool = False
    differs: str = ""
    again_s: float = 0.0
    pause_s: float = 0.0
    count: int = 0
    used_s: float = 0.0
    media: MediaTokens = field(default_factory=MediaTokens)

    def differ(self, how: str) -> None:
        self.differs = how
        self.pause_s = min(max(FIRST_PAUSE_S, 2 * self.pause_s), LONGEST_PAUSE_S)
        self.again_s = time.monotonic() + self.pause_s


class Prompts:
    """Finds the ids of prompts. sources: where the tokenizers of models are, by name, instead of
    where their workers say. beside: runs what no request waits for."""

    def __init__(
        self,
        upstream: Upstream,
        sources: Mapping[str, str],
        worker_key: str,
        beside: Beside,
    ) -> None:
        self._engines = EngineTokens(upstream, worker_key)
        self._tokenizers = Tokenizers(beside)
        self._beside = beside
        self._sources = sources
        self._renderings: dict[tuple[str, str], _Rendering] = {}
        """Keyed by namespace and name: two namespaces may serve two revisions of a model."""
        self._num_comparing = 0

    def state(self) -> dict[str, str]:
        """Returns why prompts are not rendered here, of each model whose prompts came and are
        not."""
        for rendering in self._renderings.values():
            if rendering.renderer is None and rendering.model is not None:
                self._choose(rendering.model, rendering)
        return {
            name: rendering.differs or rendering.why_not
            for (_, name), rendering in self._renderings.items()
            if rendering.differs or rendering.renderer is None
        }

    def apart(self) -> dict[str, bool]:
        """Returns, of each model whose prompts came, whether an engine gives other ids than this
        door."""
        are_apart: dict[str, bool] = {}
        for (_, name), rendering in self._renderings.items():
            is_apart = rendering.is_other or bool(rendering.differs)
            are_apart[name] = are_apart.get(name, False) or is_apart
        return are_apart

    async def of(self, api: Api, model: Model, fields: Fields, holder: str = "") -> PromptIds:
        """Returns the ids of the prompt in a body. holder: whoever asks, for turns of threads.
        Raises InvalidRequest, RouterOverloaded."""
        if api is Api.COMPLETIONS:
            given = given_ids(fields.get("prompt"))
            if given is not None:
                return PromptIds(given, len(given), "client")
        try:
            return await self._rendered(api, model, fields, holder)
        except Overloaded as error:
            raise RouterOverloaded(str(error)) from None
        except NotTokenized as error:
            length = sum(fields.size(name) for name in TEXTS[api])
            media = None
            if any(fields.mentions(name, MEDIA) for name in TEXTS[api]):
                media = media_in(map(fields.get, TEXTS[api]), length)
            sizes = prompt_sizes(api, fields)
            is_batch = len(sizes) > 1
            length = sum(sizes) if is_batch else length
            longest = max(sizes) if is_batch else length
            num_tokens = self._num_tokens(model, length, media)
            return PromptIds(
                None,
                num_tokens,
                f"blind:{error.reason}",
                # A token is a byte at least.
                bound=None if media else longest + TEMPLATE_TOKENS,
                trail=trail(api, model, fields),
                media=media,
                part_tokens=max(1, num_tokens * longest // (length or 1)) if is_batch else 0,
            )

    def _num_tokens(self, model: Model, length: int, media: Media | None) -> int:
        """Returns about how many tokens a prompt has, by the bytes of its text."""
        if media is None:
            return max(1, length // CHARACTERS_PER_TOKEN)
        rendering = self._of(model)
        rule = rendering.renderer.media_rule if rendering.renderer else None
        tokens = media.text_tokens + rendering.media.of(media, rule)
        return min(tokens, model.max_tokens - 1) if model.max_tokens > 1 else tokens

    def learn(self, model: Model, media: Media, prompt_tokens: int) -> None:
        """Notes how many tokens an engine counted of a prompt with media."""
        self._of(model).media.learn(media, prompt_tokens)

    async def _rendered(self, api: Api, model: Model, given: Fields, holder: str) -> PromptIds:
        rendering = self._of(model)
        if rendering.renderer is None:
            for tokenizer in rendering.tokenizers:
                await tokenizer.first_load()
            self._choose(model, rendering)
        renderer = rendering.renderer
        fields = await converted(api, model, given, renderer, holder)
        if renderer is not None and not rendering.differs:
            try:
                ids = await render(api, model, renderer, fields, holder)
            except TooManyTokens as error:
                length = f"{error.num_tokens} or more"
                raise ContextTooLong(PROMPTS[api], model.max_tokens, length) from None
            except Unrenderable as error:
                if error.reason in LEFT_TO_THE_ENGINE:
                    raise NotTokenized(error.reason) from None
            else:
                if rendering.count % COMPARED == 0:
                    self._compare_soon(api, model, fields, rendering, ours=ids)
                rendering.count += 1
                return PromptIds(ids, len(ids), "router", are_sent=True)
        asked = await self._ask(api, model, fields)
        is_due = rendering.differs and time.monotonic() >= rendering.again_s
        if renderer is not None and is_due:
            self._compare_soon(api, model, fields, rendering, theirs=asked)
        return PromptIds(asked, len(asked), "engine")

    def _of(self, model: Model) -> _Rendering:
        now_s = time.monotonic()
        key = model.namespace, model.name
        rendering = self._renderings.get(key)
        if rendering is None:
            used = self._renderings.items()
            self._renderings = {one: r for one, r in used if now_s - r.used_s < UNUSED_S}
            rendering = self._renderings[key] = _Rendering()
        rendering.used_s = now_s
        if rendering.model is not model or rendering.renderer is None:
            self._choose(model, rendering)
        return rendering

    def _choose(self, model: Model, rendering: _Rendering) -> None:
        """Takes the first tokenizer that is there, and is that of all workers of the model."""
        looked_at: list[LoadedTokenizer] = []
        renderer, why_not = None, NOT_LOADED
        for source in self._sources_of(model):
            loaded = self._tokenizers.at(source)
            looked_at.append(loaded)
            renderer, why_not = loaded.renderer, _why_not(loaded, model)
            if why_not in ("", NOT_LOADED):
                break  # others are looked at once this one is known to be of no use
            if renderer is not None:
                self._tokenizers.look_again(source)
        if why_not not in ("", NOT_LOADED, rendering.why_not):
            _log_not_here(model, why_not)
        rendering.model, rendering.tokenizers = model, looked_at
        rendering.renderer = None if why_not else renderer
        rendering.is_other = bool(why_not) and any(one.renderer for one in looked_at)
        rendering.why_not = why_not

    def _sources_of(self, model: Model) -> list[str]:
        """Returns where a model's tokenizer may be. An adapter has that of its model; a model that
        is served by another name is known by that, or by what its engines were started with."""
        served = (name for worker in model.workers for name in worker.models)
        names = (model.name, *served, *(worker.tokenizer for worker in model.workers))
        named = next((self._sources[name] for name in names if name in self._sources), None)
        if named is not None:
            return [named]
        told = Counter(worker.tokenizer for worker in model.workers if worker.tokenizer)
        return [source for source, _ in told.most_common(MAX_SOURCES)] or [""]

    async def _ask(self, api: Api, model: Model, fields: Mapping[str, Any]) -> NDArray[np.uint32]:
        body = question(api, model, fields)
        return await self._engines.of(model.workers, body)

    def _compare_soon(
        self,
        api: Api,
        model: Model,
        fields: Mapping[str, Any],
        rendering: _Rendering,
        **ids: Tokens,
    ) -> None:
        if self._num_comparing < MAX_COMPARING:
            self._num_comparing += 1
            rendering.again_s = time.monotonic() + rendering.pause_s
            compare = partial(self._compare, api, model, fields, rendering, **ids)
            self._beside("comparison", compare)

    async def _compare(
        self,
        api: Api,
        model: Model,
        fields: Mapping[str, Any],
        rendering: _Rendering,
        ours: Tokens | None = None,
        theirs: Tokens | None = None,
    ) -> None:
        """Compares ids rendered here with an engine's. One of both is given."""
        try:
            if ours is None and rendering.renderer is not None:
                ours = await render(api, model, rendering.renderer, fields)
            if theirs is None:
                theirs = await self._ask(api, model, fields)
        except (NotTokenized, Overloaded, TooManyTokens, Unrenderable):
            rendering.count = 0  # compare the next one
            return
        finally:
            self._num_comparing -= 1
        if ours is None:
            return  # its workers have another tokenizer meanwhile
        how = _difference(np.asarray(ours), np.asarray(theirs))
        if how:
            rendering.differ(how)
            _log_not_here(model, how)
        elif rendering.differs:
            rendering.differs = ""
            log.info("model %s is tokenized here again: the ids are its engine's", model.name)


def _why_not(loaded: LoadedTokenizer, model: Model) -> str:
    """Returns why a tokenizer is not that of a model; "": it is, as far as is known."""
    if loaded.renderer is None:
        return loaded.why_not
    hashes = ("", loaded.renderer.fingerprint)
    other = next((w.key for w in model.workers if w.tokenizer_hash not in hashes), None)
    return f"that of worker {other} is another one" if other else ""


def _log_not_here(model: Model, why: str) -> None:
    log.error("model %s is tokenized by its engine from now on, not here: %s", model.name, why)


def _difference(ours: NDArray[Any], theirs: NDArray[Any]) -> str:
    """Returns how the ids differ; "" if they do not."""
    if np.array_equal(ours, theirs):
        return ""
    both = min(len(ours), len(theirs))
    differing = np.flatnonzero(ours[:both] != theirs[:both])
    at = int(differing[0]) if len(differing) else both
    lengths = f"{len(ours)} here, {len(theirs)} there"
    return f"its ids differ from the engine's from token {at} on ({lengths})"
