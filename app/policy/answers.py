"""Figures learned from the answers of an engine that tells nothing of itself: how much of what was
routed there it keeps, and how fast it is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.core.worker_report import DEFAULT_SPEED, Speed, WorkerInfo

FADES = 0.98
"""Weight of an answer relative to the next one: it halves after 34."""
ENOUGH = 5
"""Answers that a figure is learned from, before it counts."""
LEAST_KEPT = 0.02
"""Blocks are still asked for now and then with this share, so that a growing cache is seen."""
QUEUED = 0.1
"""An answer tells nothing of the speed of prefills if more than this share of the time to its first
token was predicted to be spent behind others."""
STEP_S = 0.02
"""Seconds between tokens of an engine with DEFAULT_SPEED that decodes few requests."""
LEAST_SCALE, LARGEST_SCALE = 1e-3, 1e3


@dataclass(slots=True)
class Answer:
    """One answer of an engine.

    prompt_tokens, cached_tokens, output_tokens: as the engine says; None: it does not say.
    first_token_s: from the decision to the first token; 0: nobody saw it. rest_s: from then to the
    end.
    """

    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    first_token_s: float
    rest_s: float


@dataclass(slots=True)
class _Ratio:
    """A ratio of two sums in which older addends count less."""

    of: float = 0.0
    to: float = 0.0
    number: int = 0

    def add(self, of: float, to: float) -> None:
        self.of, self.to = FADES * self.of + of, FADES * self.to + to
        self.number += 1

    @property
    def value(self) -> float | None:
        return self.of / self.to if self.number >= ENOUGH and self.to > 0 else None


class Answers:
    def __init__(self) -> None:
        self._kept, self._prefill = _Ratio(), _Ratio()
        self._gap, self._output, self._new = _Ratio(), _Ratio(), _Ratio()

    def add(self, answer: Answer, predicted_tokens: int, queue_s: float) -> None:
        """Learn from an answer.

        predicted_tokens: of the prompt, predicted to be cached. queue_s: predicted prefills before
        it.
        """
        cached = answer.cached_tokens
        if cached is not None and predicted_tokens:
            routed = predicted_tokens / self.kept
            self._kept.add(min(cached, routed), routed)
        computed = answer.prompt_tokens - (predicted_tokens if cached is None else cached)
        if answer.first_token_s > 0 and computed > 0:
            if queue_s <= QUEUED * answer.first_token_s:
                self._prefill.add(answer.first_token_s, _usual_s(answer.prompt_tokens, computed))
            if answer.output_tokens > 1:
                self._gap.add(answer.rest_s, answer.output_tokens - 1)
        self._output.add(answer.output_tokens, 1)
        self._new.add(max(0, computed) + answer.output_tokens, 1)

    @property
    def kept(self) -> float:
        """Share, 0-1, of what was routed to the worker that it still holds when asked for again."""
        share = self._kept.value
        return 1.0 if share is None else max(LEAST_KEPT, share)

    @property
    def new_tokens(self) -> float | None:
        """Mean tokens that a request adds to what the worker holds; None: too few answers."""
        return self._new.value

    @property
    def speed(self) -> Speed:
        """Learned speed; DEFAULT_SPEED until enough is known."""
        prefill, gap_s, output = self._prefill.value, self._gap.value, self._output.value
        usual = DEFAULT_SPEED
        slow = _scale(prefill)
        pace = _scale(None if gap_s is None else gap_s / STEP_S)
        return replace(
            usual,
            prefill_s_per_token=usual.prefill_s_per_token * slow,
            prefill_s_per_token2=usual.prefill_s_per_token2 * slow,
            decode_s_per_kv_token=usual.decode_s_per_kv_token * pace,
            decode_s_per_seq=usual.decode_s_per_seq * pace,
            decode_s=usual.decode_s * pace,
            mean_output_tokens=output or usual.mean_output_tokens,
        )


def tells_speed(info: WorkerInfo) -> bool:
    """Whether a worker's agent learns how fast its engine is."""
    return not info.engine.startswith("openai")


def _usual_s(prompt_tokens: int, computed: int) -> float:
    pairs = computed * (prompt_tokens - computed / 2)
    usual = DEFAULT_SPEED
    return computed * usual.prefill_s_per_token + pairs * usual.prefill_s_per_token2


def _scale(ratio: float | None) -> float:
    return 1.0 if ratio is None else min(max(ratio, LEAST_SCALE), LARGEST_SCALE)
