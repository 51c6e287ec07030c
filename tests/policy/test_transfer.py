"""Decisions with a source, from hand-made numbers: who computes, who decodes, and at what price."""

from dataclasses import replace

import numpy as np
import pytest

from app.core.errors import NoWorkers
from app.core.loads import Load, Loads, Snapshot
from app.core.overlaps import Overlaps
from app.core.roles import Role
from app.core.types import TierOverlap
from app.core.worker_report import NO_READINGS, ForwardPassMetrics
from app.policy.pairing import roles_of
from app.policy.transfer import TransferKind
from app.policy.view import View
from app.policy.workers import Measurement, Workers
from tests.policy.test_plan import SPEED, plan, query, worker
from tests.policy.test_view import ONE, THREE, TWO, info

LINK = replace(SPEED, transfer_s=0.002, transfer_s_per_token=0.0001)
"""A millisecond to compute a token, a tenth of that and 2 ms to fetch it."""
PREFILL, DECODE, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
LONG = {"tokens": 960}
"""60 blocks of 16 tokens."""


def able(name, role, way="nixl", max_requests=8):
    may_pair = {"kv_transfer": way, "kv_compatible": "a"}
    return replace(info(name, max_requests), role=role, **may_pair)


def fleet(*infos, loads=None, speed=LINK):
    """Workers with these loads, a thousand blocks of 16 tokens each."""
    measured = Measurement(ForwardPassMetrics(kv_total_blocks=1000), speed, NO_READINGS, at_ms=0)
    incarnations = [ONE, TWO, THREE][: len(infos)]
    known = [(inc, one, measured) for inc, one in zip(incarnations, infos, strict=True)]
    given = loads or [Load() for _ in infos]
    return View(
        Snapshot(5000, Loads.of(dict(zip(incarnations, given, strict=True)))), Workers(known)
    )


def queue(seconds, requests=1):
    return Load(prefill_us=round(1e6 * seconds), requests=requests)


def source(planned):
    source = planned.decision.source
    return source and source.worker.key.worker_id


def route(planned):
    """Who decodes, who computes or hands on the prompt, and the kind."""
    made = planned.decision.source
    return worker(planned), source(planned), made.kind if made else "local"


def test_workers_that_do_all_of_a_request_have_no_roles():
    assert roles_of([info("a", 4), info("b", 4)]) is None
    assert roles_of([able("a", BOTH, ""), able("b", BOTH)]) is None
    view = fleet(info("a", 4), info("b", 4))
    assert plan(query(), view).decision.costs_by_kind == {}


def test_kv_travels_only_between_workers_with_the_same_way_of_transfer():
    roles = roles_of([able("a", PREFILL), able("b", DECODE), able("c", DECODE, "other")])
    assert roles is not None
    assert roles.sources.tolist() == [True, False, False]
    assert roles.receivers.tolist() == [False, True, False]
    assert roles.targets.tolist() == [False, True, True]


def test_a_prompt_is_computed_where_it_is_decoded_if_nothing_else_happens_there():
    view = fleet(able("a", PREFILL), able("b", DECODE))
    assert route(plan(query(**LONG), view)) == ("b", None, "local")


def test_decodes_in_flight_make_a_split_worth_its_transfer():
    """Each of 8 requests that decode is slowed by the prefill: 5 % of 960 ms each."""
    decoding = Load(requests=8, decoding=8, blocks=8)
    view = fleet(able("a", PREFILL), able("b", DECODE, max_requests=16), loads=[Load(), decoding])
    planned = plan(query(explain=True, **LONG), view)
    assert route(planned) == ("b", "a", "split")
    costs = planned.decision.costs_by_kind
    assert costs[TransferKind.SPLIT] == pytest.approx(2 * 0.96 + 0.002 + 0.096 + 0.001)
    assert costs[TransferKind.LOCAL] == pytest.approx(2 * 0.96 + 8 * 0.05 * 0.96)
    mine, its = planned.reservation, planned.reservation.source
    assert its is not None
    assert (mine.prefill_tokens, mine.blocks, mine.prefill_us) == (1, 60, 1000)
    assert (its.incarnation, its.prefill_tokens, its.blocks) == (
        ONE,
        960,
        60,
    )
    assert its.prefill_us == 960_000


def test_what_the_target_holds_need_not_travel():
    decoding = Load(requests=8, decoding=8, blocks=8)
    infos = (
        able("a", PREFILL),
        able("b", DECODE, max_requests=16),
        able("c", DECODE, max_requests=16),
    )
    view = fleet(*infos, loads=[Load(), decoding, decoding])
    held = {ONE: TierOverlap(10), THREE: TierOverlap(30)}
    planned = plan(query(held, explain=True, **LONG), view)
    assert route(planned)[0] == "c"
    local, split = (
        planned.decision.costs_by_kind[TransferKind.LOCAL],
        planned.decision.costs_by_kind[TransferKind.SPLIT],
    )
    # The source holds 10 blocks of 60, the target 30.
    assert split == pytest.approx(2 * 0.8 + 0.002 + 0.048 + 0.001)
    assert local == pytest.approx(2 * 0.48 + 8 * 0.05 * 0.48)


@pytest.mark.parametrize(
    ("owner", "way", "expected"),
    [
        (Load(), "kvroute", ("a", None, "local")),
        (queue(0.05), "kvroute", ("a", None, "local")),
        (queue(0.2), "kvroute", ("b", "a", "fetch")),
        (Load(requests=8), "kvroute", ("b", "a", "fetch")),
        (queue(0.2), "nixl", ("a", None, "local")),
        (Load(requests=8), "nixl", ("b", None, "local")),
    ],
    ids=["idle", "short queue", "long queue", "full", "behind the queue", "full, with a queue"],
)
def test_a_prefix_is_fetched_where_its_owner_is_busy_and_can_hand_it_on(owner, way, expected):
    """59 of 60 blocks arrive in 96 ms. Where a request hands them on, that waits as well."""
    view = fleet(able("a", BOTH, way), able("b", BOTH, way), loads=[owner, Load()])
    planned = plan(query({ONE: TierOverlap(59)}, **LONG), view)
    assert route(planned) == expected
    if expected[2] == "fetch":
        its = planned.reservation.source
        assert its is not None
        assert planned.reservation.prefill_tokens == 16
        assert (its.prefill_tokens, its.blocks) == (0, 59)
        planned.count()
        assert planned.view.loads[0] == replace(owner, blocks=59, total=1)
        # Of the view's time, 5,000 ms: 944 tokens of a tenth of a millisecond.
        assert planned.view.loads[0].sending_until_ms == 5094
        # And 2 ms until the first comes.
        assert planned.view.loads[1].receiving_until_ms == 5096


def test_transfers_to_come_delay_the_next_from_the_same_source():
    """A second's wait for the link of `a`, and whoever holds as much and is free is taken."""
    full = Load(requests=8)
    sending = replace(full, sending_until_ms=6000)
    infos = [able(name, BOTH, "kvroute") for name in "abc"]
    held = {ONE: TierOverlap(59), TWO: TierOverlap(59)}
    view = fleet(*infos, loads=[sending, full, Load()])
    assert route(plan(query(held, **LONG), view)) == ("c", "b", "fetch")
    alone = query({ONE: TierOverlap(59)}, explain=True, **LONG)
    planned = plan(alone, view)
    assert route(planned) == ("c", None, "local")
    free = plan(alone, fleet(*infos, loads=[full, full, Load()]))
    waits = (
        planned.decision.costs_by_kind[TransferKind.FETCH]
        - free.decision.costs_by_kind[TransferKind.FETCH]
    )
    assert waits == pytest.approx(2 * 1.0)


def test_nothing_is_fetched_from_a_worker_that_is_only_foreseen_to_hold_it():
    view = fleet(
        able("a", BOTH, "kvroute"), able("b", BOTH, "kvroute"), loads=[Load(requests=8), Load()]
    )
    asked = query({ONE: TierOverlap(59)}, **LONG)
    for published, kind in ((None, "fetch"), ({}, "local"), ({ONE: TierOverlap(40)}, "fetch")):
        asked.published = None if published is None else Overlaps(published)
        planned = plan(asked, view)
        assert route(planned)[2] == kind
        if published:
            its = planned.reservation.source
            assert its is not None
            assert (its.blocks, planned.decision.overlap.device) == (40, 40)
            assert planned.reservation.prefill_tokens == 20 * 16


def test_a_prefix_on_its_way_is_waited_for_and_not_fetched_again():
    """At `b` in 96 ms, whose wait counts twice. To compute it takes ten times as long."""
    infos = [able(name, BOTH, "kvroute") for name in "ab"]
    coming = fleet(*infos, loads=[Load(requests=8), Load(receiving_until_ms=5096)])
    asked = query({ONE: TierOverlap(59), TWO: TierOverlap(59)}, explain=True, **LONG)
    asked.published = Overlaps({ONE: TierOverlap(59)})
    planned = plan(asked, coming)
    assert route(planned) == ("b", None, "local")
    assert planned.decision.candidates[1].terms["arrival_s"] == pytest.approx(2 * 0.096)
    assert TransferKind.FETCH not in planned.decision.costs_by_kind
    # One that has come, or that brings nothing of this prompt, delays nothing.
    asked.published = None
    assert "arrival_s" not in plan(asked, coming).decision.candidates[1].terms
    other = query({ONE: TierOverlap(59)}, explain=True, **LONG)
    assert "arrival_s" not in plan(other, coming).decision.candidates[1].terms


def test_what_has_yet_to_come_is_not_handed_on():
    """`a` would be the better source of a split, had it the prefix already."""
    infos = (
        able("a", PREFILL, "kvroute"),
        able("b", PREFILL, "kvroute"),
        able("c", DECODE, "kvroute"),
    )
    loads = [Load(receiving_until_ms=5001), queue(0.1), Load(requests=4, decoding=4, blocks=4)]
    asked = query({ONE: TierOverlap(50), TWO: TierOverlap(50)}, **LONG)
    assert route(plan(asked, fleet(*infos, loads=loads), strict_roles=True))[1] == "a"
    asked.published = Overlaps({TWO: TierOverlap(50)})
    assert route(plan(asked, fleet(*infos, loads=loads), strict_roles=True))[1] == "b"


@pytest.mark.parametrize("policy", ["blocks", "least_loaded", "round_robin"])
def test_other_policies_split_wherever_there_is_a_prefill_worker(policy):
    view = fleet(able("a", PREFILL), able("b", DECODE), able("c", BOTH))
    for _ in range(4):
        target, computing, kind = route(plan(query(policy=policy, **LONG), view))
        assert (computing, kind) == ("a", "split")
        assert target in {"b", "c"}
    view = fleet(able("a", BOTH), able("b", BOTH))
    assert source(plan(query(policy=policy, **LONG), view)) is None


def test_strict_decode_workers_compute_no_prompts():
    infos = able("a", PREFILL), able("b", DECODE)
    assert source(plan(query(**LONG), fleet(*infos))) is None
    assert route(plan(query(**LONG), fleet(*infos), strict_roles=True)) == ("b", "a", "split")
    with pytest.raises(NoWorkers, match="roles are strict"):
        plan(query(**LONG), fleet(able("b", DECODE)), strict_roles=True)


def test_prefill_workers_alone_answer_nothing():
    with pytest.raises(NoWorkers, match="all have the role prefill"):
        plan(query(), fleet(able("a", PREFILL)))


def test_an_excluded_worker_is_neither_target_nor_source():
    decoding = Load(requests=8, decoding=8, blocks=8)
    infos = able("a", PREFILL), able("b", DECODE, max_requests=16)
    view = fleet(*infos, loads=[Load(), decoding])
    planned = plan(query(exclude=frozenset({"a"}), **LONG), view)
    assert route(planned) == ("b", None, "local")


def test_both_reservations_count_in_the_view():
    decoding = Load(requests=8, decoding=8, blocks=8)
    infos = able("a", PREFILL), able("b", DECODE, max_requests=16)
    view = fleet(*infos, loads=[Load(), decoding])
    plan(query(**LONG), view).count()
    assert [(load.requests, load.blocks, load.total) for load in view.loads] == [
        (1, 60, 1),
        (9, 68, 1),
    ]
    assert view.loads[0].prefill_us == 960_000


@pytest.mark.parametrize("way", ["nixl", "kvroute"])
@pytest.mark.parametrize("seed", range(20))
def test_no_pair_is_cheaper_than_the_chosen_route(seed, way):
    """Against all pairs, priced one by one, in random fleets; and it is the same one if those that
    cannot be the cheapest are not priced."""
    rng = np.random.default_rng(seed)
    infos = [able(name, BOTH, way, max_requests=64) for name in "abc"]
    loads = []
    for _ in infos:
        decoding = int(rng.integers(0, 20))
        waits = int(rng.integers(0, 3))
        loads.append(
            Load(
                prefill_us=waits * 500_000,
                requests=decoding + waits,
                decoding=decoding,
                blocks=10 * decoding,
                sending_until_ms=5000 + int(rng.integers(0, 4000)),
            )
        )
    speed = replace(LINK, decode_s_per_seq=0.0001, mean_output_tokens=100.0)
    overlaps = {inc: TierOverlap(int(rng.integers(0, 60))) for inc in (ONE, TWO, THREE)}
    view = fleet(*infos, loads=loads, speed=speed)
    planned = plan(query(overlaps, explain=True, **LONG), view)
    assert planned.reservation == plan(query(overlaps, **LONG), view).reservation
    local = planned.decision.candidates
    terms = [candidate.terms for candidate in local]
    splits, fetches = [], []
    longest = max(candidate.overlap.total for candidate in local)
    for s, t in ((s, t) for s in range(3) for t in range(3) if s != t):
        held = local[t].overlap.total
        lacking = 960 - 16 * held
        moves = LINK.transfer_s + LINK.transfer_s_per_token * lacking
        computed_s = local[s].queue_s + terms[s]["prefill_s"]
        waits = max(0.0, local[s].load.sending_s(5000) - computed_s)
        cost = local[s].cost - terms[s]["decode_s"] + 2 * waits + moves + 0.001
        names = ("queue_s", "memory_wait_s", "eviction_s", "decode_s")
        splits.append(cost + sum(terms[t][name] for name in names))
        if local[s].overlap.total == longest > held:
            moves = LINK.transfer_s + LINK.transfer_s_per_token * 16 * (longest - held)
            left = 0.001 * (960 - 16 * longest) / terms[t]["prefill_s"]
            growing = sum(terms[t][f"{name}_s"] for name in ("prefill", "blocking", "interference"))
            waits = local[s].load.sending_s(5000)
            fetches.append(local[t].cost - (1 - left) * growing + 2 * waits + moves)
    costs = planned.decision.costs_by_kind
    assert costs[TransferKind.SPLIT] == pytest.approx(min(splits))
    assert costs[TransferKind.LOCAL] == pytest.approx(min(candidate.cost for candidate in local))
    if way == "kvroute":
        assert costs[TransferKind.FETCH] == pytest.approx(min(fetches))
    made = planned.decision.source
    assert costs[made.kind if made else TransferKind.LOCAL] == min(costs.values())


@pytest.mark.parametrize("policy", ["least_loaded", "latency"])
def test_a_prompt_of_one_token_is_not_split(policy):
    view = fleet(able("a", PREFILL), able("b", DECODE))
    assert route(plan(query(tokens=1, policy=policy), view)) == ("b", None, "local")
    if policy == "least_loaded":
        assert route(plan(query(tokens=2, policy=policy), view)) == ("b", "a", "split")
