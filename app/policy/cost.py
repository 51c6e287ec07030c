"""Cost functions: what sending one request to each worker would cost. The lowest cost wins.

Every function is pure: arrays in, arrays out, one entry per worker. A cost of infinity means
that the policy rules the worker out. The terms of a cost always add up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

HOST_CREDIT = 0.75
DISK_CREDIT = 0.25
QUEUE_WHOLE_S = 2.0
BLOCKING_PER_WAITING = 0.3
DECODE_WEIGHT = 0.7
INTERFERENCE_PER_REQUEST = 0.05
TRANSFER_WEIGHT = 2.0
"""Of the wait for a link, or for what is on its way: the request's own, and that of those that will
wait behind it, as more will come where some wait."""
FAILED_TERM = "failed"
"""The term of what failures cost, which any policy's costs may have."""
AWAY_TERM = "agent_away"
"""The one of a worker of which less is known, as its agent is away."""
SHARED_TERM = "shared_s"
"""The one of what a prefix that two workers hold would save, if all held it."""
LATE_TERM = "late_s"
"""The one that says for how long an engine keeps others waiting."""
REUSE_WITHIN_S = 300.0
"""A block unused for this long is assumed to be asked for again one time in two."""
CHANCES_ALIKE = 0.25
"""Workers of one speed differ by less in the chance that what they evict is asked for again, once
their caches are full."""
CHANCES_APART = 20.0
SLOWER = 4.0
"""At most so many prefills, times how much slower the other worker is, may be added for that."""
WAIT_WEIGHTS = {"high": 2.0, "normal": 1.0, "low": 0.25}
"""Weight of the request's own wait."""
BLOCKING_OF_LOW = 4.0
CROWDED_S = 2.0
"""A queue of so many seconds keeps others away by a factor of e."""
IN_FLIGHT_TOKENS = 4096
"""What a worker lacks of a prompt counts as on its way if it is so many tokens: less is computed
before others have heard of it."""
COMPUTED_WAIT = 1.5
"""Of the queue, which counts once for itself. With 1, crowds wait where they could compute; with 2,
those that begin alike are computed everywhere (see experiments.md)."""
COMPUTING_WEIGHT = 2.0
"""Of what a prompt takes, for itself and for those behind it."""
COMPUTING = "computing_s"
"""The term."""


@dataclass(slots=True)
class RequestSize:
    """How long a prompt is, and how urgent. isl_tokens: at least 1. part_tokens: of the longest
    prompt, where the request has several; 0: it has one."""

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
        """Blocks without which an engine cannot take the request: those of its longest prompt."""
        return -(-(self.part_tokens or self.isl_tokens) // self.block_size)


@dataclass(slots=True, eq=False)
class Candidates:
    """What one decision sees of each live worker; every field is (workers,), workers >= 1.

    `Candidates(*matrix)` makes one of a (fields, workers) matrix whose rows are in this order. Not
    frozen: none is ever changed, and making a frozen one takes three times as long.
    """

    overlap_device: Floats
    """Leading blocks of the prompt that the worker would read from its device. Full blocks, so
    the three overlaps together never exceed the prompt."""
    overlap_host: Floats
    """The blocks after those that it would load from host memory."""
    overlap_disk: Floats
    """The blocks after those that it would load from disk."""
    prefill_tokens: Floats
    """Reserved uncached prompt tokens whose prefill is not complete."""
    prefill_s: Floats
    """Predicted prefill seconds in flight, drained to now."""
    active_blocks: Floats
    """KV blocks of the prompts in flight; a block that several share counts once for each."""
    active_requests: Floats
    decoding_requests: Floats
    """Those of active_requests that are past their first token."""
    max_requests: Floats
    """A worker with this many active_requests is full."""
    routed_s: Floats
    """Predicted prefill seconds routed there, which fade as requests follow, to any worker."""
    sending_s: Floats
    """Predicted seconds for which KV that it hands on to others keeps its link busy."""
    receiving_s: Floats
    """Predicted seconds until what is on its way from others has come."""
    others_requests: Floats
    """Those of active_requests that no router reserved, and max_requests allows besides: all that
    they need is part of the six fields from prefill_tokens on."""
    kv_active_blocks: Floats
    """This and the next six: as the worker last reported."""
    kv_total_blocks: Floats
    """0 while unknown, as is request_total_slots."""
    num_requests_waiting: Floats
    gpu_cache_usage: Floats
    """0-1."""
    request_active_slots: Floats
    request_total_slots: Floats
    kv_idle_before_evict_s: Floats
    """Seconds for which the blocks that it evicted lately had not been used; 0: none was."""
    prefill_s_per_token: Floats
    """This and the rest: see `app.core.worker_report.Speed`."""
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
        """The same of one worker."""
        device, host = self.overlap_device[place], self.overlap_host[place]
        return float(device + host + self.overlap_disk[place])


@dataclass(slots=True, eq=False)
class Costs:
    """cost: (workers,), lower is better. terms: (workers,) each; their sum is the cost.

    Some of these arrays are the candidates' own: copy before changing them.
    """

    cost: Floats
    terms: dict[str, Floats]


def least(values: Floats) -> float:
    """The smallest of at least one. With few workers this takes a third of `min`."""
    return float(values[values.argmin()])


CostFunction = Callable[[Candidates, RequestSize], Costs]


def latency(candidates: Candidates, size: RequestSize) -> Costs:
    """Predicted seconds that the request costs itself and the others on each worker.

    A request of high or low priority weighs queue_s and blocking_s otherwise: see `weighed`.

    queue_s         prefill already in flight, which this request waits for: up to 2 s in full, a
                    longer queue of Q s as 2 (1 + ln(Q / 2)), as caches are worth more the longer
                    queues are
    memory_wait_s   the wait for free KV blocks beyond that: for as long as a request stays, where
                    this prompt's new ones do not fit beside those that the worker reports in use
                    and the prefill in flight
    P (2 + 0.3 w + 0.05 n + r), where P is the prefill of this prompt, w of the n requests in flight
    wait for their first token, and r is the chance that what is evicted is asked for again:
        prefill_s       P
        blocking_s      P (1 + 0.3 w): the delay to those that will queue behind it, as more will
                        come where many wait
        interference_s  0.05 P n: the delay to answers in flight
        eviction_s      P r, because that much will have to be recomputed. r is 300 / (300 + idle),
                        where idle is how many seconds the worker's blocks go unused before
                        eviction. Where it is more than 0.25 above a slower worker's, 20 times the
                        square of what it is beyond that comes on top, for one k times as slow at
                        most 4 (k - 1): sessions then use the memory of the slow ones too
    decode_s        70 % of the decode steps shared with the requests in flight, over a mean output
    arrival_s       twice the time until a part of the prompt has come that is on its way from
                    another worker: as more requests will wait for it. Left out if there is none
    spread_s        while workers are idle, the prefill routed to the worker lately beyond that of
                    the one that got least, where one that is busy counts as the one that got most:
                    where no queue tells workers apart, all of the fleet's memory is to be used

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
        routed = candidates.routed_s
        routed = np.where(requests > 0.0, routed[routed.argmax()], routed)
        terms["spread_s"] = idle * (routed - least(routed))
    if size.priority != "normal":
        terms["queue_s"], terms["blocking_s"] = weighed(
            size.priority, terms["queue_s"], terms["blocking_s"], queue
        )
    if np.count_nonzero(candidates.receiving_s):
        terms["arrival_s"] = TRANSFER_WEIGHT * candidates.receiving_s
    return Costs(_sum(terms), terms)


def sharing(candidates: Candidates, size: RequestSize) -> Costs:
    """`latency`, where no worker can fetch a prefix from another.

    shared_s, <= 0: while workers are idle, what a prefix that two workers hold would save of the
    prefill if each of them held it, in the same weight: giving it to one more is an investment.
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


def awaiting(cost: CostFunction, places: Sequence[int], published: Floats) -> CostFunction:
    """`cost`, in seconds, and what the workers at `places` have to compute before, where they do
    not fetch it: the price of that has its own wait. At most what it saves to wait.

    published: leading blocks that each has on its device by now, (workers,).
    """

    def priced(candidates: Candidates, size: RequestSize) -> Costs:
        costs = cost(candidates, size)
        alone = replace(candidates, overlap_device=published)
        saved = COMPUTING_WEIGHT * (predicted_prefill_s(alone, size) - costs.terms["prefill_s"])
        wait = np.zeros_like(saved)
        for place in places:
            if not candidates.receiving_s[place]:
                wait[place] = min(COMPUTED_WAIT * candidates.prefill_s[place], saved[place])
        return Costs(costs.cost + wait, costs.terms | {COMPUTING: wait})

    return priced


def weighed(
    priority: str,
    felt_s: Floats,
    blocking_s: Floats,
    queue_s: Floats,
) -> tuple[Floats, Floats]:
    """The price of the wait, and that of keeping others waiting, (workers,) each.

    felt_s, blocking_s: those of a request of normal priority. One of low priority pays several
    times for keeping others waiting, but little where a queue is so long that they go elsewhere: so
    jobs gather on workers that are busy with jobs, and leave the rest to others.
    """
    felt_s = WAIT_WEIGHTS[priority] * felt_s
    if priority == "low":
        blocking_s = BLOCKING_OF_LOW * blocking_s * np.exp(queue_s / -CROWDED_S)
    return felt_s, blocking_s


def _sum(terms: Mapping[str, Floats]) -> Floats:
    """The sum of at least two terms."""
    first, second, *others = terms.values()
    total = first + second
    for term in others:
        total += term
    return total


def _idle_weight(requests: Floats) -> float:
    """1 while at least half of the workers are idle, ever less until none is, and then 0: queues
    then spread requests better than what is meant for idle workers."""
    idle = 1.0 - np.count_nonzero(requests) / requests.size
    return min(1.0, 2.0 * idle)


def _felt_s(queue_s: Floats) -> Floats:
    """A queue of prefills, as it counts against what the cache would save."""
    if queue_s[queue_s.argmax()] <= QUEUE_WHOLE_S:
        return queue_s
    beyond = np.maximum(queue_s / QUEUE_WHOLE_S, 1.0)
    felt: Floats = np.minimum(queue_s, QUEUE_WHOLE_S) + QUEUE_WHOLE_S * np.log(beyond)
    return felt


def _eviction_weight(candidates: Candidates) -> Floats:
    """The chance that an evicted block is asked for again, 0 where none is evicted; and more where
    it is far above that of a slower worker.

    Not above that of one as fast: a worker that has joined evicts nothing yet, and would get all
    requests until its queue is longer than any. What workers report is the same arrays for many
    decisions, and so is this.
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
    """Seconds each worker would take to load the cached part of the prompt and compute the rest.

    held: leading blocks that each has, once those that it lacks have come to its device; None:
    those that it has. Engines always compute the last token, so even a fully cached prompt costs
    one.
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
    """Seconds beyond the queue until a request has left, where the prompt's new blocks do not fit.

    decode_s: a mean output's decode steps, but for their fixed part. What requests share the worker
    reports once; what was routed there since is at most the prefill in flight. Blocks do not come
    free evenly: a few long prompts may hold nearly all of them, so whoever does not fit waits for
    one of them to end. Device overlap is assumed to be in use already.
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


def balance(candidates: Candidates, size: RequestSize) -> Costs:
    """alpha * load deviation + (1 - alpha) * new tokens / isl + 0.1 * slots in use / slots.

    After `select_worker` in NVIDIA Dynamo 0.1, lib/llm/src/kv_router/scheduler.rs. A load is the
    fraction of KV blocks in use; its deviation is from the mean over all workers. alpha is 0.7
    where the loads' sample standard deviation exceeds a tenth of their mean, else 0.3. (The
    original takes that mean over block counts; fractions make the units agree.) Only device
    overlap saves new tokens. A worker that reports all slots or blocks in use is ruled out; one
    that reports no total counts as empty.
    """
    load = _fraction(candidates.kv_active_blocks, candidates.kv_total_blocks)
    slots = _fraction(candidates.request_active_slots, candidates.request_total_slots)
    mean = load.mean()
    deviation = load - mean
    # Squared and multiplied out, so that a single worker compares 0 > 0.
    imbalanced = deviation @ deviation > (0.1 * mean) ** 2 * (load.size - 1)
    alpha = 0.7 if imbalanced else 0.3
    new_tokens = size.isl_tokens - candidates.overlap_device * size.block_size
    terms: dict[str, Floats] = {
        "load_deviation": alpha * deviation,
        "new_tokens": (1.0 - alpha) / size.isl_tokens * new_tokens,
        "slots": 0.1 * slots,
        "full": np.where((load >= 1.0) | (slots >= 1.0), np.inf, 0.0),
    }
    return Costs(_sum(terms), terms)


def _fraction(used: Floats, total: Floats) -> Floats:
    """used / total; 0 where the total is 0."""
    return np.divide(used, total, out=np.zeros_like(used), where=total > 0)


def logit(candidates: Candidates, size: RequestSize) -> Costs:
    """The negated logit: -2 * overlap fraction + cache usage + waiting / most waiting anywhere.

    After `_cost_function` in NVIDIA Dynamo's examples/llm/components/kv_router.py. Blocks of
    every tier count as overlap: the original's events named no tier. If all logits are zero the
    original expresses no preference; here all workers then tie, and any of them is chosen.
    """
    terms: dict[str, Floats] = {
        "overlap": -2.0 * size.block_size / size.isl_tokens * candidates.overlap,
        "cache_usage": candidates.gpu_cache_usage,
        "waiting": candidates.num_requests_waiting / (candidates.num_requests_waiting.max() or 1.0),
    }
    return Costs(terms["overlap"] + terms["cache_usage"] + terms["waiting"], terms)


def blocks(candidates: Candidates, size: RequestSize, *, prefill_weight: float = 1.0) -> Costs:
    """Blocks still to prefill, less a credit for cached ones, plus blocks in flight.

    After `DefaultWorkerSelector` in NVIDIA Dynamo, lib/kv-router/src/scheduling, with its
    default credits; prefill_weight is its prefill_load_scale. Dynamo counts the distinct
    blocks of the active requests together with this one's, and so does the simulation. A router
    adds up those of each request, because it is not told which of them are the same: too high by at
    most what they share.
    """
    credit = (
        candidates.overlap_device
        + HOST_CREDIT * candidates.overlap_host
        + DISK_CREDIT * candidates.overlap_disk
    )
    prefill = (candidates.prefill_tokens + size.isl_tokens) / size.block_size - credit
    prefill = prefill_weight * np.maximum(prefill, 0.0)
    decode = candidates.active_blocks + size.isl_blocks
    return Costs(prefill + decode, {"prefill_blocks": prefill, "decode_blocks": decode})


def least_loaded(candidates: Candidates, _: RequestSize) -> Costs:
    """Fewest requests in flight; among equals, fewest blocks in flight."""
    # Below 1, so that it only ever decides between equal numbers of requests.
    fraction = candidates.active_blocks / (candidates.active_blocks.max() + 1.0)
    return Costs(
        candidates.active_requests + fraction,
        {"active_requests": candidates.active_requests, "active_blocks_fraction": fraction},
    )


def fewest_requests(candidates: Candidates, _: RequestSize) -> Costs:
    """Requests in flight."""
    return Costs(candidates.active_requests, {"active_requests": candidates.active_requests})


def no_preference(candidates: Candidates, _: RequestSize) -> Costs:
    """Zero for every worker."""
    return Costs(np.zeros_like(candidates.active_requests), {})


def one_after_another(workers: Indices, nth: int, _: Generator) -> Indices:
    """Each in its order."""
    return workers[[nth % workers.size]]


def two_at_random(workers: Indices, _: int, rng: Generator) -> Indices:
    """Two different workers, every pair equally likely; fewer if there are fewer."""
    if workers.size <= 2:
        return workers
    first = rng.integers(workers.size)
    step = rng.integers(1, workers.size)
    return workers[[first, (first + step) % workers.size]]


@dataclass(frozen=True, slots=True)
class Policy:
    """How workers are compared. narrow: which of those with room are compared; None: all.

    narrow takes their indices, which decision of the router's this is, and its random generator.
    reads_reports: by the load that workers report, which changes within a moment.
    """

    cost: CostFunction
    narrow: Callable[[Indices, int, Generator], Indices] | None = None
    reads_reports: bool = False


POLICIES: Mapping[str, Policy] = {
    "latency": Policy(latency),
    "blocks": Policy(blocks),
    "balance": Policy(balance, reads_reports=True),
    "logit": Policy(logit, reads_reports=True),
    "least_loaded": Policy(least_loaded),
    "power_of_two": Policy(fewest_requests, two_at_random),
    "round_robin": Policy(no_preference, one_after_another),
    "random": Policy(no_preference),
}
"""By the names that requests and settings use."""
