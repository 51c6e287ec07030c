"""Facts of an engine that runs beside an agent, and its load."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from app.core.settings.agent import EngineAgentSettings
from app.core.trust import TOP, Rung, Trust

EngineKind = Literal["vllm", "sglang", "openai"]
USUAL_BLOCK_SIZE = 16
"""Tokens of a block, where an engine need not say how many."""


@dataclass(frozen=True, slots=True)
class EventSource:
    """ZMQ addresses at which one data-parallel rank publishes its KV events, such as
    tcp://127.0.0.1:5557.

    endpoint: "" if it publishes nothing. replay: None if the engine keeps nothing to be asked for
    again.
    """

    rank: int
    endpoint: str
    replay: str | None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of an engine, which change only when the engine is started again.

    rung: how much of what it caches it tells; where that is not all, no source has an endpoint.
    version: of an engine that does not say it, whatever it is called.

    models: the ids that requests may name, without those of adapters; the first is the model's own.
    folders: of each adapter, its name and what it was loaded from, if the engine says. block_size:
    tokens of one block in its events. capacity_tokens: of KV on each rank's device; 0: it does not
    say. pool_blocks: blocks of all kinds of layers that lie there at once, at most; 0: it does not
    say. reuse_tokens: hits land on multiples of so many tokens. recomputed_tokens: so many at the
    end of what it could reuse are computed again. lookahead_tokens: a block is reused only of
    prompts that go on with so many tokens as the first one did, as far as is known before events
    tell. tokenizer: the folder or Hugging Face name that the model was loaded from; "": it does not
    say. started_s: when its process started, or began to count, seconds since 1970; None: it does
    not say. kv_dtype, kv_settings: settings that KV depends on; "": it does not say.
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
    findings: tuple[str, ...] = ()

    def beside(self, block_size: int) -> EngineFacts:
        """Returns the engine in an index of such blocks, of which its own may not be whole ones."""
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
    """An engine lacks what it takes to know what it caches."""

    def __init__(self, cause: str, trust: Trust = Trust.APPROXIMATE) -> None:
        super().__init__(cause)
        self.rung = Rung(trust, cause)


def silent(ranks: Iterable[int]) -> tuple[EventSource, ...]:
    """Returns sources of ranks that publish nothing."""
    return tuple(EventSource(rank, "", None) for rank in ranks)


IDLE_TIMES = "vllm:kv_block_idle_before_evict_seconds"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
TRANSFERRED, COMPUTED = f"{BY_SOURCE} external_kv_transfer", f"{BY_SOURCE} local_compute"
"""Lines of a metric, by where the KV of prompt tokens came from."""


def read_from(*vllm: str, sglang: tuple[str, ...] = (), default: float | None = None) -> Any:
    """Returns a field of EngineLoad with the metrics that may have it, the newest name first."""
    return field(default=default, metadata={"vllm": vllm, "sglang": sglang, "openai": ()})


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of one rank of an engine, and counters that its speed is learned from.

    Counters only grow while the engine runs; None: the engine has none. A figure that is named as a
    field of ForwardPassMetrics is published as that.
    """

    running: int = read_from(
        "vllm:num_requests_running", sglang=("sglang:num_running_reqs",), default=0
    )
    waiting: int = read_from(
        "vllm:num_requests_waiting", sglang=("sglang:num_queue_reqs",), default=0
    )
    kv_usage: float = read_from(
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        sglang=("sglang:full_token_usage", "sglang:token_usage"),
        default=0.0,
    )
    """Share of KV blocks in use, 0-1."""
    sleeps: bool = False
    hit_rate: float | None = read_from(sglang=("sglang:cache_hit_rate",))
    """Share of recent prompt tokens whose KV was reused, 0-1."""
    kv_idle_before_evict_s: float | None = None
    idle_s: float | None = read_from(f"{IDLE_TIMES}_sum")
    idle_blocks: float | None = read_from(f"{IDLE_TIMES}_count")
    prompt_tokens: float | None = read_from("vllm:prompt_tokens_total")
    cached_tokens: float | None = read_from(
        "vllm:prompt_tokens_cached_total",
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
    )
    first_tokens: float | None = read_from("vllm:time_to_first_token_seconds_count")
    """Prompts that are computed, as far as `prompt_tokens` covers them."""
    generated_tokens: float | None = read_from("vllm:generation_tokens_total")
    finished_requests: float | None = read_from("vllm:request_success_total")
    # The next four are counted when a request ends.
    prefills: float | None = read_from("vllm:request_prefill_time_seconds_count")
    prefill_s: float | None = read_from("vllm:request_prefill_time_seconds_sum")
    """Seconds from the first step of a prompt to its first token, added up."""
    prefill_prompt_tokens: float | None = read_from("vllm:request_prompt_tokens_sum")
    prefill_computed_tokens: float | None = read_from("vllm:request_prefill_kv_computed_tokens_sum")
    prefill_busy_s: float | None = None
    """Seconds in which prompts were computed, each second counted once."""
    busy_tokens: float | None = None
    inter_tokens: float | None = read_from(
        "vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count"
    )
    """Gaps between two tokens of a request that `inter_token_s` covers."""
    inter_token_s: float | None = read_from(
        "vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_sum"
    )
    steps: float | None = read_from("vllm:iteration_tokens_total_count")
    """Steps in which `inter_tokens` were generated."""
    kv_leases_ended: float | None = read_from("vllm:nixl_num_kv_expired_reqs_total")
    kv_fetched_late: float | None = read_from("vllm:nixl_num_notifications_after_expiry_total")
    kv_transfers_failed: float | None = read_from("vllm:nixl_num_failed_transfers_total")
    kv_transfers: float | None = read_from("vllm:nixl_xfer_time_seconds_count")
    transfer_s: float | None = read_from("vllm:nixl_xfer_time_seconds_sum")
    transferred_tokens: float | None = read_from(TRANSFERRED)
    """Prompt tokens whose KV `kv_transfers` brought."""


@dataclass(frozen=True, slots=True)
class EngineReading:
    """The load of each rank at one time; none if the engine tells nothing.

    asked_s: when the engine was asked, by the event loop's clock. started_s: as in EngineFacts.
    """

    loads: dict[int, EngineLoad]
    asked_s: float
    started_s: float | None = None


_TCP_ENDPOINT = re.compile(r"tcp://(\*|\[[^\]]*\]|::|[^:/]+):(\d{1,5})")
_WILDCARDS = frozenset({"*", "0.0.0.0", "::", "[::]", "[*]"})  # noqa: S104 - what engines say
MAX_PORT = 65_535


NONE = "none"
"""Events endpoint of an engine whose events are not listened to."""


def reachable(endpoint: str, host: str, rank: int = 0) -> str:
    """Returns the address to connect to for a socket that the engine on `host` has bound to
    `endpoint`. rank: added to the port. Raises NotExact for a bad address."""
    if endpoint.startswith("ipc://") and not rank:
        return endpoint
    match = _TCP_ENDPOINT.fullmatch(endpoint)
    port = int(match[2]) + rank if match else 0
    if match is None or not 0 < port <= MAX_PORT:
        raise NotExact(f"the events endpoint {endpoint!r} is not tcp://HOST:PORT")
    return f"tcp://{host if match[1] in _WILDCARDS else match[1]}:{port}"


def binds(endpoint: str) -> bool:
    """Whether an engine binds this address. It would connect to any other."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def overridden(
    ranks: Iterable[int], host: str, given: EngineAgentSettings
) -> tuple[EventSource, ...]:
    """Returns the sources of these ranks at `given.events_endpoint`. Raises NotExact if that is
    NONE."""
    events, replay = given.events_endpoint, given.replay_endpoint
    if events == NONE:
        raise NotExact("its agent listens to no KV events: take away --events-endpoint none")
    return tuple(
        EventSource(
            rank, reachable(events, host, rank), reachable(replay, host, rank) if replay else None
        )
        for rank in ranks
    )
