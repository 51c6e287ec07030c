"""What is checked of workers: predicted hits, trust, findings, and KV that travels."""

from dataclasses import replace

import msgspec
import pytest

from app.core.loads import Load
from app.core.roles import Role
from app.core.trust import Trust
from app.core.types import Incarnation, TierOverlap
from app.core.worker_report import NO_READINGS
from app.ops.worker_checks import below_exact, findings, of_transfers, predicted
from app.ops.workers import WorkerStatus
from app.policy.locality import Best, Locality
from app.policy.record import DecisionRecord
from tests.fake_worker import worker_info

CACHED = DecisionRecord(
    request_id="r",
    at_ms=1,
    worker="w:0",
    policy="latency",
    locality=Locality.KEPT,
    isl_tokens=8,
    full_blocks=2,
    overlap=TierOverlap(2, 0, 0),
    best=Best("w:0", 2),
    tries=1,
    waited_ms=0,
    hex_blocks="",
)
"""Of blocks of 4 tokens."""
NOTHING = msgspec.structs.replace(CACHED, overlap=TierOverlap(0, 0, 0))


def worker(hit_rate):
    return WorkerStatus(
        incarnation=Incarnation(1),
        info=worker_info("w"),
        current=True,
        lease_ms=1,
        load=Load(),
        metrics_age_s=0.0,
        gpu=NO_READINGS,
        blocks={},
        hit_rate=hit_rate,
    )


@pytest.mark.parametrize(
    "unpredicted",
    [
        pytest.param({"trust": Trust.DEGRADED}, id="Redis was away"),
        pytest.param({"trust": Trust.BLIND}, id="tokens unknown"),
        pytest.param({"trust": Trust.BOUND}, id="yet to be published"),
        pytest.param({"source": "split p:0"}, id="computed elsewhere"),
    ],
)
def test_what_nobody_could_predict_is_not_compared(unpredicted):
    others = [msgspec.structs.replace(NOTHING, **unpredicted)] * 300
    assert predicted([*others, *[CACHED] * 60], [worker(1.0)]).ok is None
    few = [msgspec.structs.replace(NOTHING, **unpredicted)] * 5
    assert predicted([*few, *[CACHED] * 60], [worker(1.0)]).ok is True
    assert predicted([*few, *[NOTHING] * 60], [worker(1.0)]).ok is False


def test_workers_below_exact_are_named_with_what_would_change_that():
    why = "it publishes no KV events: start it with some"
    told = {"trust": Trust.APPROXIMATE, "trust_cause": why}
    heard = told | {"event_addresses": ("tcp://e:5557",), "trust_cause": "nothing is heard: look"}
    cacheless = {"trust": Trust.LOAD_ONLY, "trust_cause": "it caches no prefixes"}
    rows = {"w1": told, "w2": {}, "w3": told, "w4": heard, "w5": cacheless}
    checks = below_exact(worker_info(name, **given) for name, given in rows.items())
    assert [(check.about, check.ok, check.found, check.remedy) for check in checks] == [
        ("approximate workers", None, f"w1:0, w3:0: {why}", ""),
        ("events", False, "w4:0: nothing is heard, so that it is approximate", "look"),
        ("load_only workers", None, "w5:0: it caches no prefixes", ""),
    ]


def test_what_is_wrong_is_told_once_with_all_workers_that_say_so_and_what_to_do():
    both, one = "10 of 74 engines have no agent: start another", "1 of 257 adapters are left out: x"
    infos = [worker_info("w1", findings=(both, one)), worker_info("w2", findings=(both,))]
    told = [
        (check.ok, check.found, check.remedy) for check in findings([*infos, worker_info("w3")])
    ]
    assert told == [
        (False, "w1:0, w2:0: 10 of 74 engines have no agent", "start another"),
        (False, "w1:0: 1 of 257 adapters are left out", "x"),
    ]


ALIKE = ("block=16", "engine=vllm 0.32.0", "handshake=5f0c")
NIXL = replace(worker_info("a"), kv_transfer="nixl", kv_fingerprint=ALIKE)
PREFILL = replace(NIXL, role=Role.PREFILL)
DECODE = replace(NIXL, role=Role.DECODE)
OWN = replace(NIXL, kv_transfer="kvroute")


def bad(*infos):
    return {check.about for check in of_transfers(infos) if check.ok is False}


@pytest.mark.parametrize(
    ("infos", "wrong"),
    [
        ([worker_info("a"), worker_info("b")], set()),
        ([NIXL, NIXL], set()),
        ([PREFILL, DECODE], set()),
        ([PREFILL, NIXL], set()),
        ([NIXL, worker_info("b")], {"kv transfer"}),
        ([NIXL, NIXL, OWN], {"kv transfer"}),
        ([PREFILL, PREFILL], {"roles"}),
        ([DECODE, DECODE], {"roles"}),
        (
            [PREFILL, replace(DECODE, kv_fingerprint=ALIKE[:2])],
            {"kv transfer pairs"},
        ),
        ([PREFILL, replace(DECODE, kv_fingerprint=())], {"kv transfer pairs"}),
        ([PREFILL, replace(DECODE, kv_lease_s=120.0)], set()),
        ([replace(PREFILL, kv_lease_s=30.0), DECODE], set()),
        ([replace(OWN, kv_lease_s=30.0), replace(OWN, kv_lease_s=30.0)], set()),
    ],
)
def test_what_keeps_kv_from_travelling_is_told(infos, wrong):
    assert bad(*infos) == wrong


def test_what_engines_do_not_tell_is_said_to_be_unknown():
    unknown = {check.about: check for check in of_transfers([NIXL, NIXL]) if check.ok is None}
    assert list(unknown) == ["kv transfer settings"]
    for word in ("recompute", "side channel"):
        assert word in unknown["kv transfer settings"].found
    assert all(check.ok is not None for check in of_transfers([OWN, OWN]))


@pytest.mark.parametrize(("infos", "role"), [([PREFILL] * 2, "decode"), ([DECODE] * 2, "prefill")])
def test_the_missing_half_is_named(infos, role):
    [check] = [check for check in of_transfers(infos) if check.ok is False]
    assert f"--role {role}" in check.remedy


def test_leases_are_told():
    told = [replace(OWN, kv_lease_s=seconds) for seconds in (30.0, 60.0, 30.0)]
    [check] = [check for check in of_transfers(told) if check.about == "kv transfer lease"]
    assert check.ok
    assert check.found == "30 s (2), 60 s (1), for sure"


def test_what_differs_is_named_and_who_says_what():
    longer = replace(worker_info("b"), kv_transfer="nixl", kv_fingerprint=("block=32", *ALIKE[1:]))
    [check] = [check for check in of_transfers([NIXL, longer]) if check.ok is False]
    assert check.found == "block: 16 (a:0), 32 (b:0)"


def test_what_an_engine_does_not_tell_is_named():
    told = (*ALIKE[:2], "handshake=?")
    silent = replace(worker_info("b"), kv_transfer="nixl", kv_fingerprint=told)
    [check] = [check for check in of_transfers([silent, silent]) if check.ok is False]
    assert check.found == "b:0 does not tell its handshake"
    named = replace(silent, kv_compatible="a")
    assert bad(named, named) == set()
