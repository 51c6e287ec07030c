"""Learns how fast an engine is from what it says of its load now and then.

SGLang counts the time of its steps, so that its speed is a quotient. vLLM adds up how long prompts
took from their first step to their first token, and several prompts at once are each said to take
all of the time:

    seconds of a prompt = v0 + v1*computed_tokens + v2*attention_pairs

is fitted to the means of the prompts between two readings, less what they are expected to have
shared, and readings in which little was shared count most. Of short prompts nothing is learned of
v2, and it stays what was assumed. Likewise, of an engine that decodes,

    seconds of a step = w0 + w1*decode_seqs + w2*decode_context_tokens
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np

from app.core.worker_report import DEFAULT_SPEED, Speed
from app.simulation.profiles import Profile
from app.simulation.speed import LeastSquares
from workers.bridge.http.facts import EngineLoad

ENOUGH_PROMPTS = 20
MANY_PAIRS = 500_000.0
"""Pairs of 1,000 tokens: from then on, attention takes a share that can be told from noise."""
ENOUGH_GAPS = 1_000
ENOUGH_REQUESTS = 10
ENOUGH_TRANSFERS = 10
PROMPT_TOKENS = 1_000.0
"""Tokens from which on the time of a prompt, relative to which errors count, grows: otherwise only
the longest prompts would count. v0 is spread over at least so many: after short chats alone, long
prompts would seem to take many times as long as they do."""
LEAST_WEIGHT = 0.02
"""Weight of a reading in which all prompts came at once, if they always do."""
STALL = 2.0
"""Multiple of what was predicted that prompts count as taking at most."""
FEWEST_GAPS = 10
MOSTLY_PREFILL = 0.7
"""Share of the time between tokens above which, taken by prompts, a reading is left out."""
MEMORY = 0.999
"""Weight of a reading relative to the next one, in sums: it halves after 700."""
ERRORS = 20
"""Readings that the error of predictions covers, roughly."""

Source = Literal["learned", "profile", "default"]
_PREFILL = ("prefill_s_per_token", "prefill_s_per_token2")
_DECODE = ("decode_s", "decode_s_per_seq", "decode_s_per_kv_token")
_OUTPUT = ("mean_output_tokens",)
_TRANSFER = ("transfer_s", "transfer_s_per_token")


@dataclass(frozen=True, slots=True)
class Constant:
    """One of an engine's Speed. error: how far predictions made with it were off lately, relative
    to what was measured; None if none was made."""

    name: str
    value: float
    source: Source
    error: float | None


def speed_of(profile: Profile) -> Speed:
    batch = profile.max_batch_tokens
    return replace(
        DEFAULT_SPEED,
        prefill_s_per_token=profile.compute_s(batch, 0, 0) / batch,
        prefill_s_per_token2=profile.q_s,
        decode_s=profile.over_s + profile.a0_s,
        decode_s_per_seq=profile.b0_s + profile.s_s,
        decode_s_per_kv_token=profile.c_s,
        host_s_per_token=profile.host_s_per_token,
    )


class _Growth:
    """Growth of some counters of an engine since the last `restart`, and the seconds it took."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._at = 0.0
        self._values: tuple[float, ...] | None = None
        self.elapsed_s = 0.0

    def since(self, load: EngineLoad, now: float, least: float = 1.0) -> list[float] | None:
        """Returns None if a counter is missing, or the first has grown by less than `least`, or
        one has started again: then growth begins here."""
        values = self._read(load)
        if values is None:
            return None
        if self._values is None or not all(map(float.__ge__, values, self._values)):
            self.restart(load, now)
            return None
        self.elapsed_s = now - self._at
        grown = list(map(float.__sub__, values, self._values))
        return grown if grown[0] >= least else None

    def restart(self, load: EngineLoad, now: float) -> None:
        values = self._read(load)
        if values is not None:
            self._at, self._values = now, values

    def _read(self, load: EngineLoad) -> tuple[float, ...] | None:
        values = [getattr(load, name) for name in self._names]
        return None if None in values else tuple(map(float, values))


class _Mean:
    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def add(self, total: float, count: float) -> None:
        self.total = MEMORY * self.total + total
        self.count = MEMORY * self.count + count


class EngineSpeed:
    """Speed of one rank of an engine.

    capacity_tokens: of KV on the rank's device. profile: assumed until enough was seen.
    """

    def __init__(self, capacity_tokens: int, profile: Profile | None = None) -> None:
        self._capacity_tokens = capacity_tokens
        self._assumed = DEFAULT_SPEED if profile is None else speed_of(profile)
        self._assumption: Source = "default" if profile is None else "profile"
        assumed = self._assumed
        self._prefill = LeastSquares(
            [assumed.prefill_s_per_token, assumed.prefill_s_per_token2], [100.0, 2e5]
        )
        self._decode = LeastSquares(
            [assumed.decode_s_per_seq, assumed.decode_s_per_kv_token], [3.0, 3e3]
        )
        self._prompts = _Mean()
        self._long_prompts = 0.0
        self.longest_prefill = 0.0
        """Computed tokens of a prompt, on average of the reading that had the longest."""
        self._busy = _Mean()
        """Seconds of a computed token, where the engine counts them."""
        self._outputs = _Mean()
        self._gaps = 0.0
        self._transfer = LeastSquares([assumed.transfer_s_per_token], [1_000.0])
        self._transfers = 0.0
        self._errors: dict[str, float] = {}
        self._prefilled = _Growth(
            "prefills", "prefill_s", "prefill_prompt_tokens", "prefill_computed_tokens"
        )
        self._was_busy = _Growth("busy_tokens", "prefill_busy_s")
        self._decoded = _Growth("inter_tokens", "inter_token_s", "steps")
        self._prompted = _Growth("prompt_tokens", "cached_tokens")
        self._transferred = _Growth("kv_transfers", "transfer_s", "transferred_tokens")
        self._finished = _Growth("finished_requests", "generated_tokens")

    def observe(self, load: EngineLoad, now: float) -> None:
        """Learns from a reading. now: monotonic seconds."""
        self._observe_busy(load, now)
        self._observe_prefill(load, now)
        self._observe_decode(load, now)
        self._observe_transfers(load, now)
        if grown := self._finished.since(load, now):
            self._finished.restart(load, now)
            self._outputs.add(grown[1], grown[0])

    def _observe_busy(self, load: EngineLoad, now: float) -> None:
        grown = self._was_busy.since(load, now)
        if grown is None:
            return
        self._was_busy.restart(load, now)
        tokens, seconds = grown
        if self._busy.count:
            self._note_error(_PREFILL, self._busy.mean * tokens, seconds)
        self._busy.add(seconds, tokens)

    def _observe_prefill(self, load: EngineLoad, now: float) -> None:
        grown = self._prefilled.since(load, now)
        if grown is None:
            return
        count, total_s, prompt, computed = grown
        seconds, tokens = total_s / count, computed / count
        if self._prefilled.elapsed_s < seconds and count > 1:
            return  # of those that shared the time, most are yet to come
        self._prefilled.restart(load, now)
        # Prompts that begin independently of each other: so many others are under way at a time.
        others = (count - 1) * seconds / self._prefilled.elapsed_s
        seconds *= -math.expm1(-others) / others if others else 1.0
        pairs = tokens * (prompt / count - tokens / 2)
        features = np.array([[tokens, max(0.0, pairs)]])
        if self._is_learned("prefill_s_per_token"):
            expected = float(self._prefill.weights() @ np.array([1.0, *features[0]]))
            self._note_error(_PREFILL, expected, seconds)
            seconds = min(seconds, STALL * expected)
        self._prompts.add(computed, count)
        self._long_prompts += count * (pairs >= MANY_PAIRS)
        self.longest_prefill = max(self.longest_prefill, tokens)
        weight = max(LEAST_WEIGHT, math.exp(-4 * others))
        weight *= count * (PROMPT_TOKENS / (PROMPT_TOKENS + tokens)) ** 2
        self._prefill.add(features, np.array([seconds]), weight)

    def _observe_decode(self, load: EngineLoad, now: float) -> None:
        grown, prompted = (
            self._decoded.since(load, now, FEWEST_GAPS),
            self._prompted.since(load, now, 0.0),
        )
        if grown is None:
            return
        self._decoded.restart(load, now)
        self._prompted.restart(load, now)
        gaps, total_s, steps = grown
        seqs = gaps / max(steps, 1.0)
        if load.prefill_busy_s is None and prompted is not None:
            # All that decode wait while a prompt is computed.
            tokens = max(0.0, prompted[0] - prompted[1])
            if tokens and not self._is_learned("prefill_s_per_token"):
                return
            speed = self.speed()
            mean = self._prompts.mean
            prefill_s = tokens * (speed.prefill_s_per_token + speed.prefill_s_per_token2 * mean / 2)
            waited_s = prefill_s * seqs
            if waited_s > MOSTLY_PREFILL * total_s:
                return
            total_s -= waited_s
        features = np.array([[seqs, load.kv_usage * self._capacity_tokens]])
        if self._is_learned("decode_s_per_seq"):
            expected = self._decode.weights() @ np.array([1.0, *features[0]])
            self._note_error(_DECODE, float(expected), total_s / gaps)
        self._gaps += gaps
        self._decode.add(features, np.array([total_s / gaps]), gaps / 100)

    def _observe_transfers(self, load: EngineLoad, now: float) -> None:
        grown = self._transferred.since(load, now)
        if grown is None:
            return
        self._transferred.restart(load, now)
        count, seconds, tokens = grown
        features = np.array([[tokens / count]])
        if self._is_learned("transfer_s"):
            expected = self._transfer.weights() @ np.array([1.0, tokens / count])
            self._note_error(_TRANSFER, float(expected), seconds / count)
        self._transfers += count
        self._transfer.add(features, np.array([seconds / count]), count)

    def _prefill_constants(self) -> tuple[float, float]:
        if self._busy.count:
            # The time that attention took is part of it: nothing tells it apart.
            return self._busy.mean, 0.0
        fixed, per_token, per_pair = map(float, self._prefill.weights())
        if not self._is_learned("prefill_s_per_token2"):
            per_pair = self._assumed.prefill_s_per_token2
        return per_token + fixed / max(self._prompts.mean, PROMPT_TOKENS), per_pair

    def _note_error(self, names: tuple[str, ...], predicted: float, seconds: float) -> None:
        if seconds <= 0:
            return
        error = abs(predicted / seconds - 1)
        for name in names:
            before = self._errors.get(name, error)
            self._errors[name] = before + (error - before) / ERRORS

    @property
    def mean_prefill_tokens(self) -> float | None:
        """Returns the tokens that are computed of a prompt; None: not enough prompts were seen."""
        return self._prompts.mean if self._prompts.count >= ENOUGH_PROMPTS else None

    def speed(self) -> Speed:
        """Returns the learned constants, and the assumed ones where not enough was seen yet."""
        learned: dict[str, float] = {}
        if self._is_learned("prefill_s_per_token"):
            learned |= zip(_PREFILL, self._prefill_constants(), strict=True)
        if self._is_learned("decode_s_per_seq"):
            learned |= zip(_DECODE, map(float, self._decode.weights()), strict=True)
        if self._is_learned("transfer_s"):
            learned |= zip(_TRANSFER, map(float, self._transfer.weights()), strict=True)
        if self._is_learned("mean_output_tokens"):
            learned["mean_output_tokens"] = self._outputs.mean
        return replace(self._assumed, **learned)

    def constants(self) -> list[Constant]:
        """Returns all fields of `speed`, with their sources and errors."""
        speed = self.speed()
        return [
            Constant(
                field.name,
                getattr(speed, field.name),
                "learned" if self._is_learned(field.name) else self._source_of(field.name),
                self._errors.get(field.name),
            )
            for field in fields(Speed)
        ]

    def _source_of(self, name: str) -> Source:
        is_default = getattr(self._assumed, name) == getattr(DEFAULT_SPEED, name)
        return "default" if is_default else self._assumption

    def _is_learned(self, name: str) -> bool:
        if name in _PREFILL:
            seen = self._long_prompts if name == _PREFILL[1] else self._prompts.count
            return bool(self._busy.count) or seen >= ENOUGH_PROMPTS
        if name in _DECODE:
            return self._gaps >= ENOUGH_GAPS
        if name in _TRANSFER:
            return self._transfers >= ENOUGH_TRANSFERS
        return name in _OUTPUT and self._outputs.count >= ENOUGH_REQUESTS
