import pytest

from app.core.loads import Load, Loads, Reservation, Snapshot
from app.core.types import Incarnation
from app.core.verdicts import Mark, Marks, MarksByWorker, State

BUSY = Load(
    prefill_tokens=900,
    prefill_us=90_000,
    head_us=50_000,
    head_since_ms=1_000_000,
    blocks=60,
    requests=3,
    decoding=1,
    total=17,
)


@pytest.mark.parametrize(
    ("after_ms", "queue_s"),
    [
        (0, 0.090),
        (20, 0.070),
        (50, 0.040),
        (51, 0.040),  # a head that takes longer than predicted costs nothing more...
        (10_000, 0.040),
        (-30, 0.090),  # ...and one that began in our future has not drained
    ],
)
def test_the_head_of_the_prefill_queue_drains_with_time_and_the_rest_does_not(after_ms, queue_s):
    assert BUSY.queue_s(1_000_000 + after_ms) == pytest.approx(queue_s)


def test_an_idle_worker_has_no_queue():
    assert Load().queue_s(1_700_000_000_000) == 0
    assert Load(head_since_ms=1_000, requests=2, decoding=2).queue_s(5_000) == 0


def test_a_reservation_adds_to_every_counter_but_decoding():
    load = Load(prefill_tokens=900, prefill_us=90_000, head_us=50_000, head_since_ms=5)
    load.blocks, load.requests, load.decoding, load.total = 60, 3, 1, 17
    load.add(Reservation("r", prefill_tokens=100, prefill_us=10_000, blocks=7), now_ms=9, rounds=0)
    assert load == Load(1000, 100_000, 50_000, 5, 67, 4, 1, 18)


def test_a_reservation_on_a_worker_that_only_decodes_becomes_the_head():
    load = Load(head_us=0, head_since_ms=5, blocks=60, requests=2, decoding=2, total=17)
    load.add(Reservation("r", prefill_tokens=100, prefill_us=10_000, blocks=7), now_ms=9, rounds=0)
    assert load == Load(100, 10_000, 10_000, 9, 67, 3, 2, 18)


@pytest.mark.parametrize(
    ("marks", "state"),
    [
        (Marks(failed=Mark(count=1, at_ms=9_000)), State.PAUSED),
        (Marks(failed=Mark(count=1, at_ms=7_000)), State.LAPSED),
        (Marks(failed=Mark(count=2, until_ms=8_000, at_ms=6_000)), State.PAUSED),
        (Marks(failed=Mark(count=2, until_ms=7_000, at_ms=5_000)), State.LAPSED),
        (Marks(draining=Mark(), failed=Mark(until_ms=11_000)), State.DRAINING),
        (Marks(draining=Mark(), tainted=Mark()), State.TAINTED),
        (Marks(ill=Mark()), State.ILL),
    ],
)
def test_a_worker_without_a_lease_is_gone_unless_its_record_says_why(marks, state):
    one, gone = Incarnation(1), Incarnation(2)
    lapsed = frozenset({one, gone})
    seen = Snapshot(10_000, Loads.of({}), lapsed=lapsed, marks=MarksByWorker({one: marks}))
    assert (seen.verdict(one).state, seen.verdict(gone).state) == (state, State.LAPSED)
    assert seen.paused == [one] * (state is not State.LAPSED)


@pytest.mark.parametrize(
    ("marks", "state"),
    [
        (Marks(), State.SERVING),
        (Marks({"failed": Mark(count=1), "caller a": Mark(until_ms=11_000)}), State.SERVING),
        (Marks(away=Mark(until_ms=11_000)), State.AWAY),
        (Marks(away=Mark(until_ms=9_000)), State.SERVING),
        (Marks(away=Mark(until_ms=11_000), failed=Mark(until_ms=9_000)), State.TRIAL),
    ],
)
def test_a_worker_with_a_lease_serves_whatever_its_record_says(marks, state):
    assert marks.verdict(10_000, has_lease=True).state is state
