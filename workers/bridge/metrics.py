"""Prometheus metrics of an agent beside engines, read when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial

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
HELD = Family(
    "kvroute_agent_blocks",
    "gauge",
    "Blocks of the index that a rank's device holds.",
    ("worker", "rank"),
)
UNKNOWN = Family(
    "kvroute_agent_unknown_cache_share",
    "gauge",
    "At most this share of a rank's cache holds blocks that the agent does not know of, as it came "
    "after them; 0-1.",
    ("worker", "rank"),
)
LEFT_OUT = Family(
    "kvroute_agent_blocks_left_out",
    "counter",
    "Blocks ignored because their parent block is unknown.",
    ("worker", "rank"),
)
MEDIA = Family(
    "kvroute_agent_unknown_media",
    "counter",
    "Events with an unknown storage medium.",
    ("worker", "rank"),
)
LOSSES = Family(
    "kvroute_agent_losses",
    "counter",
    "How often all that was known of a rank's cache became void: streams (batches were lost, or "
    "the engine was started again), broken_events, missing_parents, leaks (more blocks than it has "
    "room for).",
    ("worker", "rank", "reason"),
)
LAG = Family(
    "kvroute_agent_event_lag_seconds",
    "gauge",
    "Delay of the last batch of events, by the clocks of engine and agent.",
    ("worker", "rank"),
)
TRUST = Family(
    "kvroute_agent_trust",
    "gauge",
    "1 for how far what is known of a rank's cache can be relied on: exact, bound, approximate or "
    "load_only.",
    ("worker", "rank", "trust"),
)
SILENT = Family(
    "kvroute_agent_events_silent",
    "gauge",
    "1 if a rank publishes, and nothing is heard of it from where the agent listens.",
    ("worker", "rank"),
)
ENGINE_LATE = Family(
    "kvroute_agent_engine_late_seconds",
    "gauge",
    "For so long a rank keeps others waiting, for a sign of life or a token, beyond what is usual.",
    ("worker", "rank"),
)
BATCHES = Family(
    "kvroute_agent_batches",
    "counter",
    "Batches of events: all, and of them replayed, after gaps, duplicates, of_other_ranks, "
    "unreadable; heard is of messages that came unasked, unknown_events of events.",
    ("worker", "rank", "what"),
)
SPEED = Family(
    "kvroute_agent_speed",
    "gauge",
    "Speed constants assumed for a rank.",
    ("worker", "rank", "constant"),
)
SPEED_SOURCE = Family(
    "kvroute_agent_speed_source",
    "gauge",
    "1 for where each constant comes from: learned, profile or default.",
    ("worker", "rank", "constant", "source"),
)
SPEED_ERROR = Family(
    "kvroute_agent_speed_error",
    "gauge",
    "Recent relative error of predictions made with a constant.",
    ("worker", "rank", "constant"),
)
SPEED_LENGTH = Family(
    "kvroute_agent_speed_learned_tokens",
    "gauge",
    "Tokens of the longest prompts, as means between two readings, that the speed of prefills was "
    "learned from. Of longer ones it is extrapolated. 0: none were seen, or the engine counts the "
    "time of its steps.",
    ("worker", "rank"),
)
FAMILIES = (
    *(
        STATE,
        ENGINE,
        HELD,
        UNKNOWN,
        LEFT_OUT,
        MEDIA,
        LOSSES,
        LAG,
        TRUST,
        SILENT,
        ENGINE_LATE,
        BATCHES,
    ),
    *(SPEED, SPEED_SOURCE, SPEED_ERROR, SPEED_LENGTH),
)


def _samples(followers: Callable[[], Iterable[EngineFollower]]) -> Iterator[Sampled]:
    for follower in followers():
        yield from _of_engine(follower, follower.worker_id)


def _of_engine(follower: EngineFollower, worker: str) -> Iterator[Sampled]:
    for state in STATES:
        yield STATE, (worker, state), follower.state == state
    facts = follower.facts
    if facts is not None:
        sizes = {"block_size": facts.block_size, "capacity_tokens": facts.capacity_tokens}
        about = {"kind": facts.kind, "version": facts.version, "models": ",".join(facts.models)}
        yield ENGINE, (worker,), about | {name: str(size) for name, size in sizes.items()}
    for rank in follower.ranks:
        yield from _of_rank(rank, (worker, str(rank.info.key.dp_rank)))
    for number, late_s in follower.lateness().items():
        yield ENGINE_LATE, (worker, str(number)), late_s
    for number, speed in follower.speeds.items():
        yield SPEED_LENGTH, (worker, str(number)), speed.longest_prefill
        for constant in speed.constants():
            name = worker, str(number), constant.name
            yield SPEED, name, constant.value
            yield SPEED_SOURCE, (*name, constant.source), 1
            if constant.error is not None:
                yield SPEED_ERROR, name, constant.error


def _of_rank(rank: Rank, name: tuple[str, str]) -> Iterator[Sampled]:
    yield HELD, name, rank.blocks.num_held
    yield UNKNOWN, name, rank.unknown_share
    yield LEFT_OUT, name, rank.blocks.num_left_out
    yield MEDIA, name, rank.blocks.num_unknown_media
    for reason, number in asdict(rank.losses).items():
        yield LOSSES, (*name, reason), number
    trust = rank.rung.trust
    yield TRUST, (*name, trust), 1
    yield SILENT, name, rank.stream is not None and trust is Trust.APPROXIMATE
    if rank.stream is None:
        return
    counters = asdict(rank.stream.counters)
    yield LAG, name, counters.pop("lag_s")
    for what, number in counters.items():
        yield BATCHES, (*name, what), number


def registry_of(followers: Callable[[], Iterable[EngineFollower]]) -> CollectorRegistry:
    """followers: those that there are now."""
    registry = CollectorRegistry()
    registry.register(FAILURES)
    registry.register(ScrapeCollector(FAMILIES, partial(_samples, followers)))
    return registry
