"""Step times of models on given hardware: the constants of the simulated engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.core.worker_report import Speed


@dataclass(frozen=True, slots=True)
class Profile:
    """A model on given hardware.

    A step takes over + max(a0 + b0*n, a1 + b1*n) + q*Σ chunk*(ctx + chunk/2) + c*Σ decode ctx + s*d
    seconds, n being its prefill tokens and decoding sequences, and d the latter alone: the first
    term of the maximum is bound by reading the weights, the second by arithmetic.

    q_s: per pair of a prefill token and a token it attends to. c_s: per token of KV that decoding
    sequences attend to. s_s: per decoding sequence, besides what each token takes.
    host_s_per_token: to load one token's KV from the host tier.
    """

    over_s: float
    a0_s: float
    b0_s: float
    a1_s: float
    b1_s: float
    q_s: float
    c_s: float
    kv_pool_tokens: int
    max_batch_tokens: int
    host_s_per_token: float
    max_num_seqs: int = 256
    kv_bytes_per_token: int = 327_680
    s_s: float = 0.0

    def compute_s(
        self,
        num_tokens: int,
        attention_pairs: float,
        decode_context_tokens: int,
        decode_seqs: int = 0,
    ) -> float:
        """Returns seconds of a step, without the load of host blocks. num_tokens: of prompts, and
        one for each decoding sequence."""
        weights = self.a0_s + self.b0_s * num_tokens
        arithmetic = self.a1_s + self.b1_s * num_tokens
        attention = self.q_s * attention_pairs + self.c_s * decode_context_tokens
        return self.over_s + max(weights, arithmetic) + attention + self.s_s * decode_seqs


# The slopes of a and b are those of operator profiles measured on H100 (LLMServingSim) with an
# analytic all-reduce. For 70B, what they come to is fitted to a public run of vLLM on 4 x H100:
# prompts of 1, 2, 4 and 8 * 2,083 tokens took 0.189, 0.350, 0.651 and 1.296 s, and a step of 1, 8
# and 32 sequences at 590 tokens 17.8, 18.8 and 21.4 ms. A test holds the profile within 5 % and 1 %
# of these. That of 4 x H200 is made faster by as much; that of 8B is not fitted.
# q is about 600 TFLOP/s per GPU, c is KV bytes at 80 % of the memory bandwidth.
# Host tier: bytes of KV per token over 40 GB/s per GPU. 70B: 80 layers * 2 * 8 heads * 128 * 2 B
# = 327,680 B over 160 GB/s; 8B: 32 * 2 * 8 * 128 * 2 B = 131,072 B over 40 GB/s.
PROFILES = {
    "70b-4xh100": Profile(
        over_s=2e-3,
        a0_s=15.8e-3,
        b0_s=41.5e-6,
        a1_s=8.6e-3,
        b1_s=72.3e-6,
        q_s=1.10e-9,
        c_s=3.06e-8,
        s_s=54.5e-6,
        kv_pool_tokens=400_000,
        max_batch_tokens=2048,
        host_s_per_token=2.05e-6,
    ),
    "70b-4xh200": Profile(
        over_s=2e-3,
        a0_s=12.5e-3,
        b0_s=41.5e-6,
        a1_s=8.6e-3,
        b1_s=72.3e-6,
        q_s=1.10e-9,
        c_s=2.13e-8,
        s_s=54.5e-6,
        kv_pool_tokens=1_000_000,
        max_batch_tokens=2048,
        host_s_per_token=2.05e-6,
    ),
    "8b-1xh100": Profile(
        over_s=2e-3,
        a0_s=8.0e-3,
        b0_s=13.5e-6,
        a1_s=2.5e-3,
        b1_s=26.0e-6,
        q_s=0.95e-9,
        c_s=4.9e-8,
        kv_pool_tokens=400_000,
        max_batch_tokens=8192,
        host_s_per_token=3.28e-6,
        kv_bytes_per_token=131_072,
    ),
}

USUAL = PROFILES["70b-4xh100"]
"""DEFAULT_SPEED is near its speed."""


def profile_of(speed: Speed, kv_pool_tokens: int) -> Profile:
    """Returns the profile of a worker that was found to be so fast.

    Figures that speeds lack, such as a step's fixed share, are scaled as prefills are.
    """
    full_step_s = USUAL.compute_s(USUAL.max_batch_tokens, 0, 0)
    scale = speed.prefill_s_per_token * USUAL.max_batch_tokens / full_step_s
    return replace(
        USUAL,
        over_s=USUAL.over_s * scale,
        a0_s=USUAL.a0_s * scale,
        b0_s=USUAL.b0_s * scale,
        a1_s=USUAL.a1_s * scale,
        b1_s=USUAL.b1_s * scale,
        s_s=USUAL.s_s * scale,
        q_s=speed.prefill_s_per_token2,
        c_s=speed.decode_s_per_kv_token,
        host_s_per_token=speed.host_s_per_token,
        kv_pool_tokens=kv_pool_tokens,
    )


@dataclass(frozen=True, slots=True)
class Link:
    """Link over which KV leaves a worker, one transfer after another. first_s: on top, for each
    transfer; those of others go on meanwhile."""

    bytes_per_s: float
    first_s: float = 0.01


class Sending:
    """The link of one worker in use."""

    def __init__(self, link: Link, profile: Profile) -> None:
        self._first_s = link.first_s
        self._s_per_token = profile.kv_bytes_per_token / link.bytes_per_s
        self._free_s = 0.0

    @property
    def speed(self) -> dict[str, float]:
        """Fields of Speed. Workers learn them as receivers; in a fleet with one kind of link they
        are the same."""
        return {"transfer_s": self._first_s, "transfer_s_per_token": self._s_per_token}

    def send(self, tokens: int, now_s: float) -> float:
        """Returns when so many tokens' KV will have arrived, sent from now on."""
        if tokens:
            self._free_s = max(self._free_s, now_s) + tokens * self._s_per_token
            return self._free_s + self._first_s
        return now_s
