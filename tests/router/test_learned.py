"""What a replica knows of the order in which a worker's blocks were last used."""

from app.core.types import SequenceHash
from app.router import learned
from app.router.learned import LastUse


def chain(first, length):
    return [SequenceHash(first * 1000 + block) for block in range(length)]


def test_what_was_used_before_memory_was_filled_anew_counts_no_longer():
    use = LastUse()
    use.note(chain(1, 4), 100, requests=1, mean_tokens=0)
    use.note(chain(2, 4), 50, requests=2, mean_tokens=0)
    now = use.now(2, mean_tokens=10)
    assert use.held(chain(1, 4), 4, now, room_tokens=50) == 4
    assert use.held(chain(1, 4), 4, now, room_tokens=49) == 0


def test_requests_of_other_replicas_fill_memory_too():
    use = LastUse()
    use.note(chain(1, 4), 100, requests=7, mean_tokens=10)
    assert use.now(7, mean_tokens=10) == 100
    assert use.now(9, mean_tokens=10) == 120
    use.note(chain(2, 4), 50, requests=10, mean_tokens=10)
    assert use.now(10, mean_tokens=10) == 170


def test_a_beginning_that_others_share_stays_as_long_as_they_use_it():
    use = LastUse()
    use.note([*chain(1, 3), *chain(2, 3)], 6, requests=1, mean_tokens=0)
    use.note([*chain(1, 3), *chain(3, 3)], 3, requests=2, mean_tokens=0)
    now = use.now(2, mean_tokens=0)
    assert use.held([*chain(1, 3), *chain(2, 3)], 6, now, room_tokens=2) == 3


def test_what_other_replicas_routed_counts_as_predicted():
    assert LastUse().held(chain(1, 4), 3, 1000, room_tokens=5) == 3


def test_no_more_counts_than_was_predicted():
    use = LastUse()
    use.note(chain(1, 8), 8, requests=1, mean_tokens=0)
    assert use.held(chain(1, 8), 5, 8, room_tokens=5) == 5


def test_of_more_blocks_than_fit_the_last_used_are_known():
    use = LastUse()
    for prompt in range(learned.MOST_USED // 8 + 1):
        use.note(chain(prompt, 8), 8, requests=prompt, mean_tokens=0)
    assert len(use._used) == learned.MOST_USED
    assert use.held(chain(0, 8), 8, 10**6, room_tokens=5) == 8  # not known any more
    assert use.held(chain(1, 8), 8, 10**6, room_tokens=5) == 0
