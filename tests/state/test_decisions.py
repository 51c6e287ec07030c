import numpy as np
import orjson
import pytest

from app.core.chains import hex_text
from app.core.keys import Keyspace
from app.core.types import SequenceHash, TierOverlap
from app.policy.affinity import Affinity
from app.policy.cost import Candidates
from app.policy.locality import Best, Locality
from app.policy.record import ROWS, ChoiceInputs, DecisionRecord, decode, encode, sampled
from app.state import decisions
from app.state.scripts import ScriptRunner

KEYS = Keyspace("test")


def record(request_id, blocks, seen=None):
    return DecisionRecord(
        request_id=request_id,
        at_ms=1_700_000_000_123,
        worker="w1:0",
        policy="latency",
        locality=Locality.LOAD,
        isl_tokens=16 * len(blocks) + 1,
        full_blocks=len(blocks),
        overlap=TierOverlap(3, 2, 1),
        best=Best("w2:1", 9),
        tries=2,
        waited_ms=40,
        hex_blocks=hex_text(sampled(blocks)).decode(),
        seen=seen,
    )


def changed(record, **values):
    """The record's JSON with some members set, or left out where the value is ABSENT."""
    members = orjson.loads(encode(record)) | values
    return orjson.dumps({name: value for name, value in members.items() if value is not ABSENT})


ABSENT = object()
CHAIN = [SequenceHash(2**63 + i) for i in range(100)]


def test_a_record_is_read_as_it_was_written():
    written = record("r1", CHAIN)
    assert decode(encode(written)) == written
    empty = record("r1", [])
    assert decode(encode(empty)) == empty


@pytest.mark.parametrize("max_queue_s", [2.5, None])
def test_the_candidates_of_a_decision_are_read_as_they_were_written(max_queue_s):
    matrix = np.arange(len(ROWS) * 3, dtype=np.float64).reshape(-1, 3) + 0.5
    # As without Redis.
    matrix[ROWS.index("max_requests")] = np.inf
    eligible, affinity = [True, False, True], Affinity(1, 0.5, max_queue_s)
    others = {"computing_s": np.array([0.5, 0.0, 0.25])}
    workers = ["w0:0", "w1:0", "w2:1"]
    seen = ChoiceInputs(workers, 1, Candidates(*matrix), eligible, affinity, others)
    found = decode(encode(record("r1", CHAIN, seen))).seen
    assert (found.workers, found.block_size) == (seen.workers, 1)
    assert (found.eligible, found.affinity) == (eligible, affinity)
    assert {name: term.tolist() for name, term in found.others.items()} == {
        "computing_s": [0.5, 0.0, 0.25]
    }
    for name, values in zip(ROWS, matrix, strict=True):
        assert getattr(found.candidates, name).tolist() == values.tolist()


@pytest.mark.parametrize("missing", ["worker", "best", "overlap", "blocks"])
def test_an_entry_that_lacks_a_field_is_refused(missing):
    with pytest.raises(ValueError, match=missing):
        decode(changed(record("r1", CHAIN), **{missing: ABSENT}))


def test_an_entry_of_another_release_may_lack_what_has_a_default_or_have_more():
    read = decode(changed(record("r", []), tenant=ABSENT, model=ABSENT, later=1))
    assert (read.tenant, read.model) == ("", "")


def test_candidates_that_do_not_match_the_workers_are_refused():
    matrix = np.zeros((len(ROWS), 2))
    seen = ChoiceInputs(["w0:0"], 16, Candidates(*matrix), [True])
    with pytest.raises(ValueError, match="does not fit 1 workers"):
        decode(encode(record("r1", CHAIN, seen)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("policy", "spoilt"), ("locality", "spoilt"), ("isl_tokens", 0), ("isl_tokens", 2**60)),
        *(("blocks", "0" * 17), ("blocks", "not hexadecimal!"), ("tries", -1), ("ending", [1])),
        ("ending", {"output_tokens": 0}),
    ],
)
def test_an_entry_that_cannot_be_explained_is_refused(field, value):
    with pytest.raises(ValueError, match=r"."):
        decode(changed(record("r1", CHAIN), **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("eligible", []),
        ("affinity", {"position": 1, "fraction": 0.5}),
        ("affinity", {"position": 0, "fraction": []}),
        ("active_requests", [None]),
        ("others", [1]),
        ("others", {"computing_s": [0.5, 0.5]}),
    ],
)
def test_candidates_that_cannot_be_priced_again_are_refused(field, value):
    seen = ChoiceInputs(
        ["w0:0"], 16, Candidates(*np.zeros((len(ROWS), 1))), [True], Affinity(0, 0.5)
    )
    written = record("r1", CHAIN, seen)
    members = orjson.loads(encode(written))["seen"]
    within = members["candidates"] if field in ROWS else members
    within[field] = value
    with pytest.raises(ValueError, match=r"."):
        decode(changed(written, seen=members))


async def test_records_are_read_page_by_page_the_latest_first_without_corrupted_ones(
    redis, monkeypatch
):
    monkeypatch.setattr(decisions, "PAGE", 2)
    spoilt = {1: {"policy": "spoilt"}, 2: {"overlap": 1}, 3: {"tries": ABSENT}}
    for n in range(6):
        entry = changed(record(f"r{n}", CHAIN), **spoilt.get(n, {}))
        await redis.xadd(KEYS["decisions"], {decisions.FIELD: entry})
    found = [record.request_id async for record in decisions.read(redis, KEYS)]
    assert found == ["r5", "r4", "r0"]


async def test_the_oldest_decisions_are_trimmed_when_there_are_too_many(redis):
    runner = ScriptRunner(redis, timeout_s=5)
    kept = decisions.record(KEYS, record("r1", CHAIN), 100)
    for _ in range(8):
        await runner.run([kept] * 100)
    assert 100 <= await redis.xlen(KEYS["decisions"]) < 250
