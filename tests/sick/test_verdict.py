"""Complaints, in worked examples of a fleet of three."""

from dataclasses import replace

from tests.sick.load import Ended
from tests.sick.page import HEAD, page
from tests.sick.rows import Row
from tests.sick.verdict import Trial, complaints

ON_S, OFF_S, END_S = 10.0, 20.0, 34.0
ROW = Row("one of three", sick=(0,))


def every(seconds, since_s=0.0, until_s=END_S):
    return [since_s + turn * seconds for turn in range(round((until_s - since_s) / seconds))]


OF_SICK, OF_WELL = (*every(0.5, 0, ON_S), *every(0.5, OFF_S)), tuple(every(0.5))


def trial(row=ROW, *, of_sick=OF_SICK, of_well=OF_WELL, failures=(), inside=0):
    """Returns a trial in which two engines get a request every half a second, and the sick one none
    meanwhile."""
    ended = [Ended(12.0, 12.8), *(Ended(12.0, 12.1, failure) for failure in failures)]
    return Trial(row, 1, ON_S, OFF_S, END_S, ended, [of_sick, of_well, every(0.5)], inside)


def test_nothing_is_complained_of_where_the_sick_one_is_left_alone_and_comes_back():
    assert complaints(trial(), 0.8) == []
    assert trial().even_after_s() == 0.0


def test_no_more_may_fail_than_were_inside():
    assert complaints(trial(failures=["502"], inside=1), 0.8) == []
    assert complaints(trial(failures=["502", "502", "503"], inside=2), 0.8) == [
        "3 failed, of which 2 were inside: 2 x 502, 1 x 503"
    ]


def test_a_sick_engine_may_not_draw_requests():
    drawn = trial(of_sick=every(0.5))
    assert complaints(drawn, 0.8) == ["sick engine 0 got 1.00 of a fair share"]
    assert complaints(replace(drawn, row=replace(ROW, most_share=None)), 0.8) == []


def test_an_engine_that_works_may_not_idle():
    idle = trial(of_well=[*every(0.5, 0, ON_S), *every(2.0, ON_S, OFF_S), *every(0.5, OFF_S)])
    assert complaints(idle, 0.8) == ["engine 1 idled: 0.40 of its share"]
    works = replace(trial(), row=replace(ROW, most_share=None, least_share=0.5))
    assert complaints(works, 0.8) == ["engine 0 works, and got 0.00 of its share"]


def test_it_must_be_even_again_within_ten_seconds():
    late = trial(of_sick=[*every(0.5, 0, ON_S), *every(0.5, OFF_S + 5.0)])
    assert late.even_after_s() == 3.5
    assert complaints(late, 0.8) == []
    assert complaints(trial(of_sick=every(0.5, 0, ON_S)), 0.8) == ["even again never"]


def test_answers_may_not_take_much_longer():
    assert complaints(trial(), 0.1) == []
    ended = [Ended(12.0, 17.8)]
    assert complaints(replace(trial(), ended=ended), 0.8) == ["answers took 5.8 s, before 0.8 s"]


def test_a_short_fault_is_judged_by_what_comes_after_it():
    short = replace(trial(of_sick=every(0.5)), off_s=ON_S + 1.0)
    assert complaints(short, 0.8) == []


def test_the_page_has_a_row_for_each_fault_that_cost_something():
    result = {"row": "one of three", "replicas": 1, "failed": 2, "inside": 3, "even_after_s": 0.5}
    three = result | {"replicas": 3, "even_after_s": None}
    stopped = three | {"row": "a replica is stopped", "failed": 0}
    well = result | {"row": "nothing", "failed": 0}
    written = page([result, three, stopped, well])
    assert written.startswith(HEAD)
    assert "| what | failed, 1 replica | inside, 1 replica |" in written
    assert "| one of three | 2 | 3 | 0.5 | 2 | 3 | never |" in written
    assert "| a replica is stopped |  |  |  | 0 | 3 | never |" in written
    assert written.endswith("shares were even within 4 s: nothing.\n")
