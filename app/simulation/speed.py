"""Speed of a worker, learned from the steps of its engine.

Two least-squares fits, in which old steps count less and less. Ridge regression pulls each towards
the defaults to the extent that its steps leave it undetermined:

    steps without prefill:  seconds = w0 + w1*decode_seqs + w2*decode_context_tokens
    steps with prefill:     seconds = v0 + v1*prefill_tokens + v2*attention_pairs + decode part

A single fit would attribute to the decoding requests what prefill adds: a step's time is not linear
throughout, as small batches are memory-bound and large ones compute-bound.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from app.core.types import Tier
from app.core.worker_report import DEFAULT_SPEED, Speed
from app.simulation.steps import EngineStep

FORGET = 0.9995
"""Weight of a step relative to the next one: it halves after 1,400 steps."""
STALL = 10.0
STALL_S = 1.0
"""Steps count as at most STALL times as long as expected, or as STALL_S, whichever is longer: a
pause of the process would outweigh thousands of steps."""
STEPS_TO_EXPECT = 10
"""Steps that a fit must have had before any length is abnormal."""
DISCOUNT = 1e-6
"""Weight of the loads from before a tier is retried: they count only until there is another."""
OUTPUT_WINDOW = 200
"""Requests that the mean output length covers, roughly."""


def sped_up(speed: Speed, factor: float) -> Speed:
    """Returns the speed of the same worker when its clock runs `factor` times as fast."""
    seconds = [f.name for f in fields(Speed) if "_s_per_" in f.name or f.name[-2:] == "_s"]
    return replace(speed, **{name: getattr(speed, name) / factor for name in seconds})


class LeastSquares:
    """Fit of seconds = weights · (1, features...), with no negative weights.

    prior: expected weights of the features. They count as much as one step with features of size
    `typical` each; the constant is unconstrained.
    """

    def __init__(self, prior: list[float], typical: list[float]) -> None:
        self._scale: NDArray[np.float64] = np.array([1.0, *typical])
        ridge: NDArray[np.float64] = np.array([1e-9, *(1.0 for _ in prior)])
        self._ridge = np.diag(ridge)
        self._pull = ridge * np.array([0.0, *prior]) * self._scale
        self._gram = np.zeros_like(self._ridge)
        self._moment = np.zeros_like(self._pull)

    def add(
        self, features: NDArray[np.float64], seconds: NDArray[np.float64], weight: float = 1.0
    ) -> None:
        """Add steps in chronological order; features: (steps, features). weight: of each."""
        x = np.insert(features, 0, 1.0, axis=1)
        if self._gram[0, 0] >= STEPS_TO_EXPECT:
            seconds = np.minimum(seconds, np.maximum(STALL * (x @ self.weights()), STALL_S))
        x /= self._scale
        # No weight is negative: a step shorter than priors say shows that they are too large.
        expected = np.maximum(x @ self._pull, 1e-12)
        self._pull *= np.min(seconds / expected, initial=1.0, where=seconds > 0)
        weights = weight * FORGET ** np.arange(len(x) - 1, -1, -1)
        fade = FORGET ** len(x)
        self._gram = fade * self._gram + x.T @ (weights[:, None] * x)
        self._moment = fade * self._moment + x.T @ (weights * seconds)

    def weights(self) -> NDArray[np.float64]:
        """Returns the constant, then the features' weights. A negative one is set to 0 and the rest
        refitted."""
        gram, moment = self._gram + self._ridge, self._moment + self._pull
        free = np.ones(len(moment), dtype=bool)
        while True:
            fitted: NDArray[np.float64] = np.zeros_like(moment)
            fitted[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
            if fitted.min() >= 0:
                return fitted / self._scale
            free[fitted.argmin()] = False


class SpeedLearner:
    """Learner that is told every step by `observe`, and asked for the `speed` to be published.

    batch_tokens: tokens of a full step. `prefill_s_per_token` is the time of a full step of nothing
    but prefill, without its attention, divided by its tokens: v1 + v0 / batch_tokens. A queued
    prompt takes that per token, as all tokens of a step share its fixed cost.
    """

    FOLD_AT = 256
    """Steps buffered before they are added to the fits: one by one would cost ten times as much."""

    def __init__(self, batch_tokens: int, defaults: Speed = DEFAULT_SPEED) -> None:
        self._batch_tokens = batch_tokens
        self._defaults = defaults
        self._decode = LeastSquares(
            [defaults.decode_s_per_seq, defaults.decode_s_per_kv_token], [3.0, 3e4]
        )
        self._prefill = LeastSquares(
            [defaults.prefill_s_per_token, defaults.prefill_s_per_token2], [1e3, 1e7]
        )
        self._transfer = LeastSquares([defaults.transfer_s_per_token], [1e3])
        self._has_transfers = False
        self._rows: list[tuple[float, ...]] = []
        self._load_s = dict.fromkeys(Tier, 0.0)
        self._loaded_tokens = dict.fromkeys(Tier, 0.0)
        self._mean_output = defaults.mean_output_tokens
        self._num_outputs = 10  # the default counts as ten requests

    def observe(self, step: EngineStep, wall_s: float, for_others: Container[str] = ()) -> None:
        """Learn from a step of `wall_s` seconds of wall time, including its share of loading.

        for_others: ids of requests that other workers decode: their answers of one token say
        nothing of how long answers are.
        """
        load_s = wall_s * step.load_s / step.duration_s
        decode = (step.decode_seqs, step.decode_context_tokens)
        self._rows.append((wall_s - load_s, *decode, step.prefill_tokens, step.attention_pairs))
        if step.loaded_tokens:
            self.observe_load(Tier.HOST, step.loaded_tokens, load_s)
        for request in step.finished:
            if request.request_id in for_others:
                continue
            self._num_outputs = min(self._num_outputs + 1, OUTPUT_WINDOW)
            self._mean_output += (request.output_tokens - self._mean_output) / self._num_outputs
        if len(self._rows) >= self.FOLD_AT:
            self._fold()

    def observe_load(self, tier: Tier, num_tokens: int, seconds: float) -> None:
        """Learn from a load of this many tokens' KV from a tier."""
        self._load_s[tier] = FORGET * self._load_s[tier] + seconds
        self._loaded_tokens[tier] = FORGET * self._loaded_tokens[tier] + num_tokens

    def observe_transfer(self, num_tokens: int, seconds: float) -> None:
        """Learn from this many tokens' KV, which came from another worker in one piece."""
        self._transfer.add(np.array([[float(num_tokens)]]), np.array([seconds]))
        self._has_transfers = True

    def discount_loads(self, tier: Tier) -> None:
        """Make past loads from a tier count next to nothing compared with those to come."""
        self._load_s[tier] *= DISCOUNT
        self._loaded_tokens[tier] *= DISCOUNT

    def speed(self) -> Speed:
        """Returns the learned values, and the defaults where there is nothing to learn from."""
        self._fold()
        decode, prefill = self._decode.weights(), self._prefill.weights()
        learned = self._defaults
        if self._has_transfers:
            first_s, s_per_token = map(float, self._transfer.weights())
            learned = replace(learned, transfer_s=first_s, transfer_s_per_token=s_per_token)
        return replace(
            learned,
            prefill_s_per_token=float(prefill[1] + prefill[0] / self._batch_tokens),
            prefill_s_per_token2=float(prefill[2]),
            decode_s=float(decode[0]) or self._defaults.decode_s,
            decode_s_per_seq=float(decode[1]),
            decode_s_per_kv_token=float(decode[2]),
            host_s_per_token=self._load_s_per_token(Tier.HOST, self._defaults.host_s_per_token),
            disk_s_per_token=self._load_s_per_token(Tier.DISK, self._defaults.disk_s_per_token),
            mean_output_tokens=self._mean_output,
        )

    def _load_s_per_token(self, tier: Tier, default: float) -> float:
        tokens = self._loaded_tokens[tier]
        return self._load_s[tier] / tokens if tokens else default

    def _fold(self) -> None:
        if not self._rows:
            return
        rows = np.array(self._rows)
        self._rows.clear()
        seconds, decode, prefill = rows[:, 0], rows[:, 1:3], rows[:, 3:]
        mixed = prefill[:, 0] > 0
        self._decode.add(decode[~mixed], seconds[~mixed])
        beside = decode @ self._decode.weights()[1:]
        self._prefill.add(prefill[mixed], (seconds - beside)[mixed])
