"""Prometheus metrics of an agent beside an engine, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from workers.bridge.beside import Beside


class AgentCollector(Collector):
    def __init__(self, beside: Beside) -> None:
        self._beside = beside

    def collect(self) -> Iterator[Metric]:
        beside = self._beside
        state = GaugeMetricFamily(
            "kvroute_agent_engine_state",
            "1 for what the engine is: serving, asleep or unavailable. Only a serving one is "
            "routed to.",
            labels=["state"],
        )
        for name in ("serving", "asleep", "unavailable"):
            state.add_metric([name], beside.state == name)
        yield state
        if beside.facts is not None:
            engine = InfoMetricFamily("kvroute_agent_engine", "The engine as it was found.")
            engine.add_metric(
                [],
                {
                    "kind": beside.facts.kind,
                    "version": beside.facts.version,
                    "models": ",".join(beside.facts.models),
                    "block_size": str(beside.facts.block_size),
                    "capacity_tokens": str(beside.facts.capacity_tokens),
                },
            )
            yield engine
        yield from self._of_cache()
        yield from self._of_stream()
        yield from self._of_speed()

    def _of_cache(self) -> Iterator[Metric]:
        held = GaugeMetricFamily(
            "kvroute_agent_blocks",
            "Blocks of the index that a rank's device holds.",
            labels=["rank"],
        )
        unknown = GaugeMetricFamily(
            "kvroute_agent_unknown_cache_share",
            "At most this share of a rank's cache holds blocks that the agent does not know of, as "
            "it came after them; 0-1.",
            labels=["rank"],
        )
        bounds = GaugeMetricFamily(
            "kvroute_agent_overlap_is_upper_bound",
            "1 if the engine may reuse less than is shown, because events do not say what some of "
            "its layers need.",
            labels=["rank"],
        )
        left_out = CounterMetricFamily(
            "kvroute_agent_blocks_left_out",
            "Blocks whose events were not understood, as their parents are not known.",
            labels=["rank"],
        )
        media = CounterMetricFamily(
            "kvroute_agent_unknown_media", "Events in a medium that is not known.", labels=["rank"]
        )
        losses = CounterMetricFamily(
            "kvroute_agent_losses",
            "How often all that was known of a rank's cache became void: streams (batches were "
            "lost, or the engine was started again), broken_events, missing_parents, leaks (more "
            "blocks than it has room for).",
            labels=["rank", "reason"],
        )
        for rank in self._beside.ranks:
            name = [str(rank.info.key.dp_rank)]
            held.add_metric(name, rank.blocks.num_held)
            unknown.add_metric(name, rank.unknown_share)
            bounds.add_metric(name, rank.blocks.is_upper_bound)
            left_out.add_metric(name, rank.blocks.num_left_out)
            media.add_metric(name, rank.blocks.num_unknown_media)
            for reason, number in asdict(rank.losses).items():
                losses.add_metric([*name, reason], number)
        yield from (held, unknown, bounds, left_out, media, losses)

    def _of_stream(self) -> Iterator[Metric]:
        lag = GaugeMetricFamily(
            "kvroute_agent_event_lag_seconds",
            "Age of the last batch of events when it came, by the clocks of engine and agent.",
            labels=["rank"],
        )
        answers = GaugeMetricFamily(
            "kvroute_agent_events_answered",
            "1 if the engine answered when last asked for events.",
            labels=["rank"],
        )
        batches = CounterMetricFamily(
            "kvroute_agent_batches",
            "Batches of events: all, and of them replayed, after gaps, duplicates, "
            "of_other_ranks, unreadable; unknown_events is of events.",
            labels=["rank", "what"],
        )
        for rank in self._beside.ranks:
            name = [str(rank.info.key.dp_rank)]
            counters = asdict(rank.stream.counters)
            lag.add_metric(name, counters.pop("lag_s"))
            answers.add_metric(name, rank.stream.answers)
            for what, number in counters.items():
                batches.add_metric([*name, what], number)
        yield from (lag, answers, batches)

    def _of_speed(self) -> Iterator[Metric]:
        values = GaugeMetricFamily(
            "kvroute_agent_speed",
            "What a rank's speed is taken to be.",
            labels=["rank", "constant"],
        )
        sources = GaugeMetricFamily(
            "kvroute_agent_speed_source",
            "1 for where each constant comes from: learned, profile or default.",
            labels=["rank", "constant", "source"],
        )
        errors = GaugeMetricFamily(
            "kvroute_agent_speed_error",
            "How far predictions with a constant were off lately, relative to what was measured.",
            labels=["rank", "constant"],
        )
        for number, speed in self._beside.speeds.items():
            for constant in speed.constants():
                name = [str(number), constant.name]
                values.add_metric(name, constant.value)
                sources.add_metric([*name, constant.source], 1)
                if constant.error is not None:
                    errors.add_metric(name, constant.error)
        yield from (values, sources, errors)


def registry_of(beside: Beside) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(AgentCollector(beside))
    return registry
