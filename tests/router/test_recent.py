"""What workers hold that have just answered, before the index is told: chains A B C D of blocks."""

from app.core.types import Incarnation, SequenceHash, TierOverlap
from app.router.lookup import KEPT_S, MAX_KEPT, Recent

ONE, OTHER = Incarnation(1), Incarnation(2)


def chain(text):
    """A hash a letter, which stands for all letters before it too."""
    return [SequenceHash(hash(text[: end + 1])) for end in range(len(text))]


def test_the_next_turn_finds_the_whole_prompt_of_the_last_one():
    recent = Recent()
    recent.add(ONE, chain("ABCD"), 0.0)
    assert recent.held(chain("ABCDEF"), {}, KEPT_S) == {ONE: 4}
    assert recent.held(chain("ABC"), {}, KEPT_S) == {ONE: 3}


def test_a_prompt_that_branches_off_finds_what_it_shares():
    recent = Recent()
    recent.add(ONE, chain("ABCDEFGH"), 0.0)
    recent.add(OTHER, chain("ABX"), 0.0)
    for shared in range(1, 8):
        asked = chain("ABCDEFGH"[:shared] + "YYYY")
        assert recent.held(asked, {}, 0.0) == {ONE: shared, OTHER: min(shared, 2)}
    assert recent.held(chain("X"), {}, 0.0) == {}


def test_what_is_published_is_not_counted_again():
    recent = Recent()
    recent.add(ONE, chain("ABCD"), 0.0)
    assert recent.held(chain("ABCD"), {ONE: TierOverlap(device=4)}, 0.0) == {}
    assert recent.held(chain("ABCD"), {ONE: TierOverlap(1, 2)}, 0.0) == {ONE: 4}


def test_the_longest_of_several_answers_counts():
    recent = Recent()
    for text in ("AB", "ABCD", "ABC"):
        recent.add(ONE, chain(text), 0.0)
    assert recent.held(chain("ABCDE"), {}, 0.0) == {ONE: 4}


def test_it_is_forgotten_after_a_second_or_once_there_is_too_much():
    recent = Recent()
    recent.add(ONE, chain("ABCD"), 0.0)
    assert recent.held(chain("ABCD"), {}, KEPT_S + 0.01) == {}
    recent.add(ONE, chain("ABCD"), 2.0)
    for _ in range(MAX_KEPT):
        recent.add(ONE, chain("X"), 2.0)
    assert recent.held(chain("ABCD"), {}, 2.0) == {}
