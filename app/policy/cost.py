"""Cost functions: what sending one request to each worker would cost. The lowest cost wins.

Every function is pure: arrays in, arrays out, one entry per worker. A cost of infinity means
that the policy rules the worker out. The terms of a cost always add up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

QUEUE_WHOLE_S = 2.0
BLOCKING_PER_WAITING = 0.3
DECODE_WEIGHT = 0.7
INTERFERENCE_PER_REQUEST = 0.05
BEHIND_WEIGHT = 2.0
"""A wait or a prefill counts for the request and those behind it: where some wait, more come."""
FAILED_TERM = "failed"
AWAY_TERM = "agent_away"
SHARED_TERM = "shared_s"
LATE_TERM = "late_s"
REUSE_WITHIN_S = 300.0
"""A block unused for this long is assumed to be asked for again one time in two."""
CHANCES_ALIKE = 0.25
"""Workers of one speed differ by less in `_chances` once their caches are full."""
CHANCES_APART = 20.0
SLOWER = 4.0
"""The addition is at most this many prefills, times how much slower the other worker is."""
WAIT_WEIGHTS = {"high": 2.0, "normal": 1.0, "low": 0.25}
BLOCKING_OF_LOW = 4.0
IN_FLIGHT_TOKENS = 4096
"""A prompt counts as computed on a worker that lacked this many of its tokens: fewer are computed
before others have heard of them."""
COMPUTING = "computing_s"


@dataclass(slots=True)
class RequestSize:
    """A prompt's length and urgency.

    isl_tokens: at least 1. part_tokens: of the longest prompt, where the request has several; 0: it
    has one.
    """

    isl_tokens: int
    block_size: int
    priority: str = "normal"
    part_tokens: int = 0

    @property
    def isl_blocks(self) -> int:
        """Blocks that the prompt occupies; a partly filled last one counts whole."""
        return -(-self.isl_tokens // self.block_size)

    @property
    def least_blocks(self) -> int:
        """Blocks that an engine needs for the request's longest prompt."""
        return -(-(self.part_tokens or self.isl_tokens) // self.block_size)


@dataclass(slots=True, eq=False)
class Candidates:
    """The workers as one decision sees them; every field is (workers,), workers >= 1.

    `Candidates(*matrix)` takes a (fields, workers) matrix whose rows are in this order. Not frozen:
    making a frozen one takes three times as long.

    overlap_device, overlap_host, overlap_disk: leading blocks of the prompt that the worker would
    read from its device, the blocks after those in host memory, and the blocks after those on disk.
    Full blocks, so their sum never exceeds the prompt.
    prefill_tokens: reserved uncached prompt tokens whose prefill is not complete. prefill_s:
    predicted prefill seconds in flight, drained to now.
    active_blocks: KV blocks of the prompts in flight; a shared block counts once for each prompt.
    active_requests: in flight; decoding_requests: those past their first token. max_requests: a
    worker with this many active_requests is full.
    routed_tokens: uncached prompt tokens routed there, fading as requests follow to any worker.
    sending_s: predicted seconds for which KV handed on to others keeps its link busy. receiving_s:
    predicted seconds until what is on its way from others has come.
    others_requests: those of active_requests that no router reserved, and max_requests allows
    besides: their needs are part of the six fields from prefill_tokens on.
    kv_active_blocks to kv_idle_before_evict_s: as the worker last reported. Totals are 0 while
    unknown; gpu_cache_usage is 0-1; kv_idle_before_evict_s is how many seconds evicted blocks had
    not been used, 0 if none was evicted.
    prefill_s_per_token and the rest: see `app.core.worker_report.Speed`.
    """

    overlap_device: Floats
    overlap_host: Floats
    overlap_disk: Floats
    prefill_tokens: Floats
    prefill_s: Floats
    active_blocks: Floats
    active_requests: Floats
    decoding_requests: Floats
    max_requests: Floats
    routed_tokens: Floats
    sending_s: Floats
    receiving_s: Floats
    others_requests: Floats
    kv_active_blocks: Floats
    kv_total_blocks: Floats
    num_requests_waiting: Floats
    gpu_cache_usage: Floats
    request_active_slots: Floats
    request_total_slots: Floats
    kv_idle_before_evict_s: Floats
    prefill_s_per_token: Floats
    prefill_s_per_token2: Floats
    decode_s_per_kv_token: Floats
    decode_s_per_seq: Floats
    host_s_per_token: Floats
    disk_s_per_token: Floats
    mean_output_tokens: Floats
    transfer_s: Floats
    transfer_s_per_token: Floats
    decode_s: Floats

    @property
    def overlap(self) -> Floats:
        """Leading blocks of the prompt that the worker holds, in any tier."""
        return self.overlap_device + self.overlap_host + self.overlap_disk

    def overlap_at(self, place: int) -> float:
        device, host = self.overlap_device[place], self.overlap_host[place]
        return float(device + host + self.overlap_disk[place])


@dataclass(slots=True, eq=False)
class Costs:
    """Costs of one request on each worker.

    cost: (workers,), lower is better. terms: (workers,) each; their sum is the cost. Some of these
    arrays are the candidates' own: copy before changing them.
    """

    cost: Floats
    terms: dict[str, Floats]


def least(values: Floats) -> float:
    """Returns the smallest value. With few workers this takes a third of `min`."""
    return float(values[values.argmin()])


CostFunction = Callable[[Candidates, RequestSize], Costs]


def latency(candidates: Candidates, size: RequestSize) -> Costs:
    """Predicted seconds that the request costs itself and the others on each worker:

        q(Q) + M + P (2 + 0.3 w + 0.05 n + r) + 0.7 decode + 2 A + i (S - min S)

    P is the prefill of this prompt; w of the n requests in flight wait for their first token; r is
    the chance that what is evicted is asked for again. That product is four terms, prefill_s,
    blocking_s, interference_s and eviction_s, as they have a reason each. The others are queue_s,
    memory_wait_s, decode_s, arrival_s (left out if nothing is on its way) and spread_s (left out
    if no worker is idle). docs/design/costs.md explains symbols and terms. A request of high or low
    priority weighs queue_s and blocking_s otherwise.

    These weights did best over conversation and agentic traces in simulation: docs/experiments.md.
    """
    prefill = predicted_prefill_s(candidates, size)
    decode = candidates.mean_output_tokens * (
        candidates.decode_s_per_kv_token * (candidates.active_blocks * size.block_size)
        + candidates.decode_s_per_seq * candidates.decoding_requests
    )
    queue = candidates.prefill_s
    requests = candidates.active_requests
    waiting = requests - candidates.decoding_requests
    terms: dict[str, Floats] = {
        "queue_s": _felt_s(queue),
        "memory_wait_s": _memory_wait_s(candidates, size, decode),
        "prefill_s": prefill,
        "blocking_s": prefill * (1.0 + BLOCKING_PER_WAITING * waiting),
        "interference_s": INTERFERENCE_PER_REQUEST * prefill * requests,
        "eviction_s": prefill * _eviction_weight(candidates),
        "decode_s": DECODE_WEIGHT * decode,
    }
    idle = _idle_weight(requests)
    if idle:
        # In tokens: seconds predicted before the engine was measured would count for long.
        routed = candidates.routed_tokens * candidates.prefill_s_per_token
        routed = np.where(requests > 0.0, routed[routed.argmax()], routed)
        terms["spread_s"] = idle * (routed - least(routed))
    if size.priority != "normal":
        terms["queue_s"] = WAIT_WEIGHTS[size.priority] * terms["queue_s"]
    if size.priority == "low":
        # Dear where others wait, but little where the queue is long: so jobs gather beside jobs.
        terms["blocking_s"] = BLOCKING_OF_LOW * terms["blocking_s"] * np.exp(queue / -QUEUE_WHOLE_S)
    if np.count_nonzero(candidates.receiving_s):
        terms["arrival_s"] = BEHIND_WEIGHT * candidates.receiving_s
    return Costs(added_up(terms), terms)


def sharing(candidates: Candidates, size: RequestSize) -> Costs:
    """Returns the costs of `latency` where no worker can fetch a prefix from another.

    shared_s, <= 0: while workers are idle, what the prefix that two workers hold would save if each
    worker held it, in the same weight: giving it to a third worker is an investment.
    """
    costs = latency(candidates, size)
    idle = _idle_weight(candidates.active_requests)
    if not idle or candidates.active_requests.size < 2:
        return costs
    held = idle * float(np.partition(candidates.overlap, -2)[-2])
    if not held:
        return costs
    terms = costs.terms
    prefill = terms["prefill_s"]
    left = predicted_prefill_s(candidates, size, held) / np.maximum(prefill, 1e-12)
    growing = prefill + terms["blocking_s"] + terms["interference_s"] + terms["eviction_s"]
    saved = (np.minimum(left, 1.0) - 1.0) * growing
    return Costs(costs.cost + saved, terms | {SHARED_TERM: saved})


def with_term(
    cost: CostFunction, name: str, term: Callable[[Candidates, RequestSize, Costs], Floats]
) -> CostFunction:
    """Returns `cost` with one more term, which `term` gives from what the others come to."""

    def priced(candidates: Candidates, size: RequestSize) -> Costs:
        plain = cost(candidates, size)
        more = term(candidates, size, plain)
        return Costs(plain.cost + more, plain.terms | {name: more})

    return priced


def awaiting(cost: CostFunction, places: Sequence[int], published: Floats) -> CostFunction:
    """Returns `cost`, in seconds, with a term `computing_s` for the workers at `places`, which have
    to compute a part of the prompt first that counts as held. At most what waiting saves.

    A worker that fetches that part instead has its own wait in the price. published: leading blocks
    that each worker has on its device by now, (workers,).
    """

    def wait_s(candidates: Candidates, size: RequestSize, plain: Costs) -> Floats:
        alone = replace(candidates, overlap_device=published)
        saved = BEHIND_WEIGHT * (predicted_prefill_s(alone, size) - plain.terms["prefill_s"])
        wait = np.zeros_like(saved)
        for place in places:
            if not candidates.receiving_s[place]:
                wait[place] = min(candidates.prefill_s[place], saved[place])
        return wait

    return with_term(cost, COMPUTING, wait_s)


def added_up(terms: Mapping[str, Floats]) -> Floats:
    """Returns the cost that the terms, two or more, come to."""
    first, second, *others = terms.values()
    total = first + second
    for term in others:
        total += term
    return total


def _idle_weight(requests: Floats) -> float:
    """Returns 1 while at least half of the workers are idle, then less, and 0 once none is."""
    idle = 1.0 - np.count_nonzero(requests) / requests.size
    return min(1.0, 2.0 * idle)


def _felt_s(queue_s: Floats) -> Floats:
    if queue_s[queue_s.argmax()] <= QUEUE_WHOLE_S:
        return queue_s
    beyond = np.maximum(queue_s / QUEUE_WHOLE_S, 1.0)
    felt: Floats = np.minimum(queue_s, QUEUE_WHOLE_S) + QUEUE_WHOLE_S * np.log(beyond)
    return felt


def _eviction_weight(candidates: Candidates) -> Floats:
    """Returns the chance that an evicted block is asked for again, 0 where none is evicted, raised
    where it is far above a slower worker's.

    Not raised above that of an equally fast one: a worker that has joined evicts nothing yet, and
    would get all requests. Reports are the same arrays for many decisions, and so is this.
    """
    global _weighed
    idle_s, token_s = candidates.kv_idle_before_evict_s, candidates.prefill_s_per_token
    if _weighed is None or _weighed[0] is not idle_s or _weighed[1] is not token_s:
        _weighed = idle_s, token_s, _weighing(idle_s, token_s)
    return _weighed[2]


_weighed: tuple[Floats, Floats, Floats] | None = None


def _weighing(idle_s: Floats, token_s: Floats) -> Floats:
    chance = np.where(idle_s > 0.0, REUSE_WITHIN_S / (REUSE_WITHIN_S + idle_s), 0.0)
    alike = least(chance) + CHANCES_ALIKE
    apart = chance - alike
    if apart[apart.argmax()] > 0.0:
        slower = token_s[chance <= alike].max() / np.maximum(token_s, 1e-12) - 1.0
        most = SLOWER * np.maximum(slower, 0.0)
        chance += np.minimum(CHANCES_APART * np.maximum(apart, 0.0) ** 2, most)
    return chance


def predicted_prefill_s(
    candidates: Candidates, size: RequestSize, held: float | None = None
) -> Floats:
    """Returns seconds each worker would take to load the cached part and compute the rest.

    held: leading blocks that every worker is assumed to have on its device; None: those that each
    has. Engines always compute the last token, so even a fully cached prompt costs one.
    """
    host, disk = candidates.overlap_host, candidates.overlap_disk
    is_slower = np.count_nonzero(host) or np.count_nonzero(disk)
    uncached: Floats | float
    if held is None:
        cached = candidates.overlap if is_slower else candidates.overlap_device
        uncached = np.maximum(size.isl_tokens - cached * size.block_size, 1.0)
    else:
        uncached = max(size.isl_tokens - held * size.block_size, 1.0)
    # uncached * cached + uncached² / 2 pairs, where cached = isl - uncached
    # Of several prompts, which have no overlap, each attends to itself alone.
    attended = 0.5 * size.part_tokens if size.part_tokens else size.isl_tokens - 0.5 * uncached
    seconds: Floats = uncached * (
        candidates.prefill_s_per_token + candidates.prefill_s_per_token2 * attended
    )
    if is_slower:
        load = candidates.host_s_per_token * host + candidates.disk_s_per_token * disk
        seconds += load * size.block_size
    return seconds


def _memory_wait_s(candidates: Candidates, size: RequestSize, decode_s: Floats) -> Floats:
    """Returns seconds beyond the queue until a request has left, where new blocks do not fit.

    decode_s: a mean output's decode steps, but for their fixed part. The worker reports shared
    blocks once; what was routed there since is at most the prefill in flight. Blocks do not come
    free evenly: whatever does not fit waits for a whole request to end. Device overlap is taken to
    be in use.
    """
    in_use = candidates.kv_active_blocks + candidates.prefill_tokens / size.block_size
    free = candidates.kv_total_blocks - in_use
    if least(free) >= size.least_blocks:
        # The usual case. Returning here saves a third of all that the policy computes.
        return np.zeros(free.size)
    # With nothing in flight nothing is freed, and what was reported in use has ended since.
    is_short = (size.least_blocks - candidates.overlap_device > free) & (
        candidates.active_requests > 0
    )
    is_short &= candidates.kv_total_blocks > 0
    stays_s = candidates.mean_output_tokens * candidates.decode_s + decode_s
    wait: Floats = np.where(is_short, np.maximum(stays_s - candidates.prefill_s, 0.0), 0.0)
    return wait
