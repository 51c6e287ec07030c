"""Prometheus metrics of an agent beside engines, read when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from app.core.trust import Trust
from app.http.metrics import Family, Sampled, ScrapeCollector
from workers.bridge.follower import STATES, EngineFollower
from workers.bridge.rank import Rank
from workers.tasks import FAILURES

STATE = Family(
    "kvroute_agent_engine_state",
    "gauge",
    "1 for what the engine is: serving; draining; asleep; ill: it is there, and does not work; "
    "refused by Redis; unfit: it cannot be followed as it is; unavailable.",
    ("worker", "state"),
)
ENGINE = Family("kvroute_agent_engine", "info", "The engine, as detected.", ("worker",))


def _family(name: str, kind: str, about: str, *labels: str) -> Family:
    return Family(f"kvroute_agent_{name}", kind, about, ("worker", "rank", *labels))


OF_RANK: Mapping[Family, Callable[[Rank], Any]] = {
    _family("blocks", "gauge", "Blocks of the index that a rank's device holds."): lambda rank: (
        rank.blocks.num_held
    ),
    _family(
        "unknown_cache_share",
        "gauge",
        "At most this share of a rank's cache holds blocks that the agent does not know of, as it "
        "came after them; 0-1.",
    ): lambda rank: rank.unknown_share,
    _family(
        "blocks_left_out", "counter", "Blocks ignored because their parent block is unknown."
    ): lambda rank: rank.blocks.num_left_out,
    _family("unknown_media", "counter", "Events with an unknown storage medium."): lambda rank: (
        rank.blocks.num_unknown_media
    ),
    _family(
        "events_silent",
        "gauge",
        "1 if a rank publishes, and nothing is heard of it from where the agent listens.",
    ): lambda rank: rank.stream is not None and rank.rung.trust is Trust.APPROXIMATE,
    _family(
        "engine_late_seconds",
        "gauge",
        "For so long a rank keeps others waiting, for a sign of life or a token, beyond what is "
        "usual.",
    ): lambda rank: rank.late_s,
    _family(
        "speed_learned_tokens",
        "gauge",
        "Tokens of the longest prompts, as means between two readings, that the speed of prefills "
        "was learned from. Of longer ones it is extrapolated. 0: none were seen, or the engine "
        "counts the time of its steps.",
    ): lambda rank: rank.speed.longest_prefill,
}
LOSSES = _family(
    "losses",
    "counter",
    "How often all that was known of a rank's cache became void: streams (batches were lost, or "
    "the engine was started again), broken_events, missing_parents, leaks (more blocks than it has "
    "room for).",
    "reason",
)
TRUST = _family(
    "trust",
    "gauge",
    "1 for how far what is known of a rank's cache can be relied on: exact, bound, approximate or "
    "load_only.",
    "trust",
)
LAG = _family(
    "event_lag_seconds",
    "gauge",
    "Delay of the last batch of events, by the clocks of engine and agent.",
)
BATCHES = _family(
    "batches",
    "counter",
    "Batches of events: all, and of them replayed, after gaps, duplicates, of_other_ranks, "
    "unreadable; heard is of messages that came unasked, unknown_events of events.",
    "what",
)
SPEED = _family("speed", "gauge", "Speed constants assumed for a rank.", "constant")
SPEED_SOURCE = _family(
    "speed_source",
    "gauge",
    "1 for where each constant comes from: learned, profile or default.",
    "constant",
    "source",
)
SPEED_ERROR = _family(
    "speed_error", "gauge", "Recent relative error of predictions made with a constant.", "constant"
)
FAMILIES = (
    *(STATE, ENGINE, *OF_RANK, LOSSES, TRUST, LAG, BATCHES),
    *(SPEED, SPEED_SOURCE, SPEED_ERROR),
)


def _samples(followers: Callable[[], Iterable[EngineFollower]]) -> Iterator[Sampled]:
    for follower in followers():
        worker, facts = follower.worker_id, follower.facts
        for state in STATES:
            yield STATE, (worker, state), follower.state == state
        if facts is not None:
            sizes = {"block_size": facts.block_size, "capacity_tokens": facts.capacity_tokens}
            about = {"kind": facts.kind, "version": facts.version, "models": ",".join(facts.models)}
            yield ENGINE, (worker,), about | {name: str(size) for name, size in sizes.items()}
        for rank in follower.ranks:
            yield from _of_rank(rank, (worker, str(rank.info.key.dp_rank)))


def _of_rank(rank: Rank, name: tuple[str, str]) -> Iterator[Sampled]:
    for family, read in OF_RANK.items():
        yield family, name, read(rank)
    for reason, number in asdict(rank.losses).items():
        yield LOSSES, (*name, reason), number
    yield TRUST, (*name, rank.rung.trust), 1
    for constant in rank.speed.constants():
        yield SPEED, (*name, constant.name), constant.value
        yield SPEED_SOURCE, (*name, constant.name, constant.source), 1
        if constant.error is not None:
            yield SPEED_ERROR, (*name, constant.name), constant.error
    if rank.stream is not None:
        counters = asdict(rank.stream.counters)
        yield LAG, name, counters.pop("lag_s")
        for what, number in counters.items():
            yield BATCHES, (*name, what), number


def registry_of(followers: Callable[[], Iterable[EngineFollower]]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(FAILURES)
    registry.register(ScrapeCollector(FAMILIES, partial(_samples, followers)))
    return registry
