"""Counts of how much of all prompts is reused, and where the rest is lost, by model."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator

from prometheus_client import CollectorRegistry

from app.core.sketch import ChainSketch
from app.http.metrics import OTHER, Family, Sampled, ScrapeCollector
from app.policy.decision import Decision, Step
from app.policy.plan import Plan
from app.policy.reuse import (
    PROMPT,
    UNFORESEEN,
    held_tokens,
    lost_by_decision,
    lost_by_engine,
)

MAX_MODELS = 32
"""Later models are counted as one: each replica tells the others of each, every second."""
HOUR_S = 3600.0
EVERY_S = 60.0
TOKENS = Family(
    "kvroute_reuse_tokens",
    "counter",
    "Tokens of routed prompts by how far their reuse came: prompt (all); seen: asked before within "
    "an hour, at this replica; held by a worker; by the best one that could take the request; by "
    "the one chosen; used: cached, as its engine says. Also unforeseen: cached, but not known.",
    ("model", "step"),
)
LOST = Family(
    "kvroute_reuse_lost_tokens",
    "counter",
    "Tokens that did not reach a step of kvroute_reuse_tokens_total, by cause.",
    ("model", "step", "cause"),
)

Counts = Counter[tuple[str, str]]
"""Tokens by step and cause. Of all prompts, and of those unforeseen, the cause is ""."""


class Reuse:
    """Counts requests once: those that a door carries when they end, others when decided."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._asked = ChainSketch()
        self._held = ChainSketch()
        self._counts: dict[str, Counts] = {}
        self.began_s = time.monotonic()
        self._before = deque([(self.began_s, dict[str, Counts]())])
        """Counts of each minute of the last hour, and of one before it."""
        registry.register(ScrapeCollector([TOKENS, LOST], self._samples))

    def decided(self, plan: Plan) -> None:
        """Find what was lost on the way to a worker."""
        request, now_s = plan.query.request, time.monotonic()
        chain = request.chain
        if request.asked_blocks is None:
            request.asked_blocks = self._asked.add(chain, now_s)
        held = held_once = plan.query.held.longest
        if held < request.asked_blocks:
            held_once = self._held.leading(chain[: request.asked_blocks], now_s)
        self._held.add(chain[:held], now_s)
        plan.decision.lost = lost_by_decision(plan, request.asked_blocks, held_once)

    def ended(self, decision: Decision, model: str, cached: int | None) -> None:
        """Count a request. model: "" if unknown. cached: tokens of its prompt that the engine had
        cached; None: it did not say."""
        if model not in self._counts and len(self._counts) >= MAX_MODELS:
            model = OTHER
        counts = self._counts.setdefault(model, Counter())
        counts[PROMPT, ""] += decision.isl_tokens
        # Counter.update takes twice the time for a few of them.
        for lost in (decision.lost, lost_by_engine(decision, cached)):
            for why, tokens in lost.items():
                counts[why] += tokens
        if unforeseen := max(0, (cached or 0) - held_tokens(decision)):
            counts[UNFORESEEN, ""] += unforeseen

    def lately(self, now_s: float) -> list[tuple[str, str, str, int]]:
        """Returns model, step, cause and tokens of the last hour, in plain types. now_s:
        monotonic."""
        if now_s - self._before[-1][0] >= EVERY_S:
            self._before.append((now_s, {m: c.copy() for m, c in self._counts.items()}))
            while now_s - self._before[0][0] > HOUR_S + EVERY_S:
                self._before.popleft()
        began = self._before[0][1]
        return [
            (model, str(step), cause, tokens)
            for model, counts in self._counts.items()
            for (step, cause), tokens in (counts - began.get(model, Counter())).items()
        ]

    def _samples(self) -> Iterator[Sampled]:
        for model, counts in self._counts.items():
            left = counts[PROMPT, ""]
            yield TOKENS, (model, PROMPT), left
            yield TOKENS, (model, UNFORESEEN), counts[UNFORESEEN, ""]
            for step in Step:
                for (at, cause), tokens in counts.items():
                    if at == step:
                        left -= tokens
                        yield LOST, (model, step, cause), tokens
                yield TOKENS, (model, step), left
