"""What is known of an engine that runs beside an agent, and what it says of its load."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from app.core.trust import TOP, Rung, Trust

EngineKind = Literal["vllm", "sglang", "openai"]
"""openai: any other server that speaks OpenAI's API."""
USUAL_BLOCK_SIZE = 16
"""Tokens, where an engine need not say how many its blocks have."""


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where one data-parallel rank publishes its KV events.

    endpoint, replay: ZMQ addresses to connect to, such as tcp://127.0.0.1:5557. endpoint: "" if it
    publishes nothing. replay: None if the engine keeps nothing to be asked for again.
    """

    rank: int
    endpoint: str
    replay: str | None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine is; it changes only when the engine is started again.

    rung: how much of what it caches it tells; where that is not all, no source has an endpoint.
    version: of an engine that does not say it, whatever it is called.

    models: the ids that requests may name, without those of adapters; the first is the model's own.
    folders: of each adapter, its name and what it was loaded from, if the engine says.
    block_size: tokens of one block in its events. capacity_tokens: of KV on each rank's device; 0:
    it does not say. pool_blocks: of its blocks, at most so many lie there at once, whatever kinds
    of layers they are for; 0: it does not say.
    reuse_tokens: hits land on multiples of so many tokens. recomputed_tokens: so many at the end of
    what it could reuse are computed again. lookahead_tokens: a block is reused only of prompts that
    go on with so many tokens as the first one did, as far as is known before events tell.
    announces_copies: see EngineBlocks. tokenizer: the folder or Hugging Face name that the model
    was loaded from; "": it does not say.
    started_s: when its process started, or began to count, seconds since 1970; None: it does not
    say. kv_dtype, and
    what else it is set to that KV depends on: as it says; "": it does not.
    """

    kind: EngineKind
    version: str
    models: tuple[str, ...]
    max_model_len: int | None
    block_size: int
    capacity_tokens: int
    reuse_tokens: int
    sources: tuple[EventSource, ...]
    adapters: tuple[str, ...] = ()
    recomputed_tokens: int = 0
    announces_copies: bool = False
    started_s: float | None = None
    tokenizer: str = ""
    folders: tuple[tuple[str, str], ...] = ()
    lookahead_tokens: int = 0
    kv_dtype: str = ""
    kv_settings: tuple[tuple[str, str], ...] = ()
    pool_blocks: int = 0
    rung: Rung = TOP

    def beside(self, block_size: int) -> EngineFacts:
        """The same engine, in an index of such blocks, of which its own may not be whole ones."""
        if self.rung.trust is not Trust.EXACT or self.block_size % block_size == 0:
            return self
        cause = (
            f"the engine's blocks of {self.block_size} tokens are not whole blocks of the "
            f"{block_size} that its namespace has: start it with a multiple of them, or give it a "
            "--namespace of its own"
        )
        ranks = (source.rank for source in self.sources)
        return replace(self, rung=Rung(Trust.APPROXIMATE, cause), sources=silent(ranks))


class NotExact(Exception):
    """An engine lacks what it takes to know what it caches. cause: as in Rung."""

    def __init__(self, cause: str, trust: Trust = Trust.APPROXIMATE) -> None:
        super().__init__(cause)
        self.rung = Rung(trust, cause)


def silent(ranks: Iterable[int]) -> tuple[EventSource, ...]:
    """Of ranks that publish nothing."""
    return tuple(EventSource(rank, "", None) for rank in ranks)


@dataclass(frozen=True, slots=True)
class Overrides:
    """What is taken as given instead of what the engine says: each is a flag of the agent with the
    same name. None: the engine must say it.

    events_endpoint, replay_endpoint: of the engine's first rank; each further one has the next
    port. engine_block_size, capacity_tokens: as block_size and capacity_tokens of EngineFacts.
    model: an id that requests may name, in place of all those that the engine lists.
    """

    engine_kind: EngineKind | None = None
    events_endpoint: str | None = None
    replay_endpoint: str | None = None
    engine_block_size: int | None = None
    capacity_tokens: int | None = None
    data_parallel_size: int | None = None
    model: tuple[str, ...] = ()


NO_OVERRIDES = Overrides()


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What one rank of an engine says of its load, and counters that its speed is learned from.

    kv_usage: share of its KV blocks in use, 0-1. hit_rate: share of recent prompt tokens whose KV
    was reused. idle_before_evict_s: how long recently evicted blocks had gone unused. Each counter
    only grows while the engine runs; None: the engine has none.
    """

    running: int
    waiting: int
    kv_usage: float
    sleeps: bool = False
    hit_rate: float | None = None
    idle_before_evict_s: float | None = None
    prompt_tokens: float | None = None
    cached_tokens: float | None = None
    """Of the prompt tokens, those whose KV was reused."""
    first_tokens: float | None = None
    """Prompts that are computed, as far as `prompt_tokens` covers them."""
    generated_tokens: float | None = None
    finished_requests: float | None = None
    prefills: float | None = None
    """Prompts that `prefill_s`, `prefill_prompt_tokens` and `prefill_computed_tokens` cover."""
    prefill_s: float | None = None
    """Seconds that prompts took from their first step to their first token, added up."""
    prefill_prompt_tokens: float | None = None
    prefill_computed_tokens: float | None = None
    prefill_busy_s: float | None = None
    """Seconds in which prompts were computed, each counted once."""
    busy_tokens: float | None = None
    """Prompt tokens that were computed in `prefill_busy_s`."""
    inter_tokens: float | None = None
    """Gaps between two tokens of a request that `inter_token_s` covers."""
    inter_token_s: float | None = None
    steps: float | None = None
    """Steps in which `inter_tokens` were generated."""
    leases_ended: float | None = None
    """On KV that others had not fetched all of."""
    fetched_late: float | None = None
    """Fetches that it heard of after that."""
    failed_transfers: float | None = None
    transfers: float | None = None
    """Of KV from other engines."""
    transfer_s: float | None = None
    """Seconds that they took, added up."""
    transferred_tokens: float | None = None
    """Prompt tokens whose KV they brought."""


@dataclass(frozen=True, slots=True)
class EngineReading:
    """What an engine says of itself at one time. loads: by rank; empty if it says nothing.

    started_s: as in EngineFacts.
    """

    loads: dict[int, EngineLoad]
    started_s: float | None = None


_TCP_ENDPOINT = re.compile(r"tcp://(\*|\[[^\]]*\]|::|[^:/]+):(\d{1,5})")
_WILDCARDS = frozenset({"*", "0.0.0.0", "::", "[::]", "[*]"})  # noqa: S104 - what engines say
MAX_PORT = 65_535


NONE = "none"
"""The events endpoint of an engine whose events are not listened to."""


def reachable(endpoint: str, host: str, rank: int = 0) -> str:
    """The address to connect to for a socket that the engine on `host` has bound to `endpoint`.

    rank: added to the port. Raises NotExact for a bad address.
    """
    if endpoint.startswith("ipc://") and not rank:
        return endpoint
    match = _TCP_ENDPOINT.fullmatch(endpoint)
    port = int(match[2]) + rank if match else 0
    if match is None or not 0 < port <= MAX_PORT:
        raise NotExact(f"the events endpoint {endpoint!r} is not tcp://HOST:PORT")
    return f"tcp://{host if match[1] in _WILDCARDS else match[1]}:{port}"


def binds(endpoint: str) -> bool:
    """Does an engine bind this address? It would connect to any other."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def overridden(ranks: Iterable[int], host: str, overrides: Overrides) -> tuple[EventSource, ...]:
    """The sources of these ranks at `overrides.events_endpoint`. Raises NotExact if it is NONE."""
    events, replay = overrides.events_endpoint, overrides.replay_endpoint
    assert events is not None
    if events == NONE:
        raise NotExact("its agent listens to no KV events: take away --events-endpoint none")
    return tuple(
        EventSource(
            rank,
            reachable(events, host, rank),
            reachable(replay, host, rank) if replay else None,
        )
        for rank in ranks
    )
