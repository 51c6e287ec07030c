"""Which decisions say what a worker will find cached, and which say nothing of it."""

import msgspec
import pytest

from app.core.loads import Load
from app.core.trust import Trust
from app.core.types import Incarnation, TierOverlap
from app.core.worker_report import NO_READINGS
from app.ops.worker_checks import below_exact, findings, predicted
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
