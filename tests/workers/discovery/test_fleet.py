"""Which engines a process begins with, and which it ends with."""

import asyncio
from dataclasses import replace

import pytest

from app.core.limits import MAX_ENGINES
from app.ops.worker_checks import findings as of_findings
from app.state.connect import connect
from tests.eventually import eventually
from tests.redis_servers import stopped
from tests.workers.discovery.fleets import LONG_S, Told, engine, engines, live, running, until_live
from workers.discovery import fleet as discovery
from workers.discovery.engine import ANSWERS, Absences
from workers.discovery.fleet import FleetChange, plan

A, B = engine("a", "http://a:1"), engine("b", "http://b:1")


LEAVES, ENDED = {"leaving": True}, {"leaving": True, "ended": True}
MOVED, RENAMED = engine("a", "http://a:2"), engine("b", "http://a:1")
PLANS = {
    "claimed": (
        *({}, {"1": A, "2": replace(B, **LEAVES), "3": B}, {"1"}),
        FleetChange(begin=("1",)),
    ),
    "leaves without an agent": (
        *({}, {"1": replace(A, **LEAVES), "2": replace(B, **ENDED)}, {"1", "2"}),
        FleetChange(drain=("1",)),
    ),
    "leaves, and another has its name": (
        *({}, {"1": replace(A, **LEAVES), "2": A}, {"1"}),
        FleetChange(),
    ),
    "followed, too busy to be ready": (
        {"1": A},
        {"1": replace(A, ready=False)},
        {"1"},
        FleetChange(),
    ),
    "another process has claimed it": ({"1": A}, {"1": A}, set(), FleetChange(hand_over=("1",))),
    "leaves, or changes": (
        *(
            {"1": A, "2": B},
            {"1": replace(A, **LEAVES), "2": engine("b", "http://b:2")},
            {"1", "2"},
        ),
        FleetChange(leave=("1", "2")),
    ),
    "ended": ({"1": A}, {"1": replace(A, **ENDED)}, {"1"}, FleetChange(drop=("1",))),
    "another has its place": ({"1": A}, {"2": RENAMED}, set(), FleetChange(drop=("1",))),
    "lacks": ({"1": A}, {"2": B}, set(), FleetChange(leave=("1",))),
    "another has its name": ({"1": A}, {"2": MOVED}, {"2"}, FleetChange(drop=("1",))),
    "alone with its name": ({}, {"2": MOVED}, {"2"}, FleetChange(begin=("2",))),
}


@pytest.mark.parametrize(("followed", "told", "claimed", "change"), PLANS.values(), ids=PLANS)
def test_engines_begin_and_end_as_a_source_tells(followed, told, claimed, change):
    assert plan(followed, told, claimed) == change


BOTH = {"1": A, "2": B}
ONE = {"1": BOTH["1"]}
GONE_S = 60.0


def noted(*answers):
    """When each came after one of both, in seconds, and what it told of."""
    absences = Absences(GONE_S)
    absences.note(BOTH, 0.0)
    for now, told in answers:
        absences.note(told, now)
    return absences


def test_an_engine_is_gone_once_all_answers_have_lacked_it_for_long():
    there = noted((0.0, ONE), (5.0, ONE), (GONE_S - 1.0, ONE))
    assert there.lacking == {"2": replace(BOTH["2"], ready=False)}
    assert not noted((0.0, ONE), (5.0, ONE), (GONE_S, ONE)).lacking


def test_an_answer_that_has_it_begins_the_count_anew():
    assert noted((0.0, ONE), (5.0, BOTH), (10.0, ONE), (15.0, ONE), (GONE_S, ONE)).lacking


def test_a_few_answers_say_nothing_however_long_they_took():
    assert ANSWERS == 3
    assert noted((0.0, ONE), (1000.0, ONE)).lacking


def test_an_answer_of_no_engine_says_nothing():
    assert noted(*((now * 10.0, {}) for now in range(20))).lacking.keys() == {"1", "2"}
    assert noted((0.0, ONE), (30.0, ONE), (GONE_S, {})).lacking.keys() == {"1", "2"}
    assert noted((0.0, {}), (50.0, ONE), (55.0, ONE), (GONE_S, ONE)).lacking


def test_an_engine_that_was_leaving_or_is_replaced_does_not_lack():
    other = engine("b", "http://c:1")
    assert not noted((0.0, ONE | {"3": other})).lacking
    assert not noted((0.0, ONE | {"2": replace(BOTH["2"], leaving=True)}), (1.0, ONE)).lacking


def test_an_engine_that_is_forgotten_does_not_lack():
    absences = noted((0.0, ONE))
    absences.forget("2")
    absences.note(ONE, 1.0)
    assert not absences.lacking


async def test_an_engine_that_leaves_ends_its_requests_first(redis, tmp_path):
    source = Told()
    async with engines(1) as (a,), running(redis, tmp_path, source) as fleet:
        source.tell({"1": engine("a", a.url)})
        await until_live(redis, "a")
        a.faults = replace(a.faults, more_running=1)
        follower = fleet.followers["1"]

        async def running_now():
            return sum(rank.load.running for rank in follower.ranks)

        await eventually(running_now)
        source.tell({"1": replace(engine("a", a.url), leaving=True)})
        await until_live(redis)
        assert fleet.followers == {"1": follower}
        assert follower.state == "draining"
        a.faults = replace(a.faults, more_running=0)
        await eventually(lambda: asyncio.sleep(0, len(fleet.followers)), lambda number: number == 0)


async def acted_on(source, fleet, answer, times):
    """The source tells this so many times, and each time the fleet acts."""
    for number in range(times):
        mark = f"{number}-{'-'.join(answer)}"
        source.tell({**answer, mark: engine(mark, "http://127.0.0.1:9")})

        async def followed(mark=mark):
            return mark in fleet.followers

        await eventually(followed)


async def test_an_engine_that_works_outlasts_answers_that_lack_it(redis, tmp_path):
    source = Told()
    async with engines(2) as (a, b), running(redis, tmp_path, source) as fleet:
        both = {"1": engine("a", a.url), "2": engine("b", b.url)}
        source.tell(both)
        await until_live(redis, "a", "b")
        followers = dict(fleet.followers)
        for _ in range(2 * ANSWERS):
            await acted_on(source, fleet, {"1": both["1"]}, times=1)
            await acted_on(source, fleet, {"2": both["2"]}, times=1)
        await until_live(redis, "a", "b")
        assert followers.items() <= fleet.followers.items()
        await acted_on(source, fleet, {"1": both["1"]}, times=2 * ANSWERS)
        await until_live(redis, "a")


async def test_an_engine_that_the_same_answer_lacks_again_and_again_leaves(redis, tmp_path):
    source, long_s = Told(), 10 * LONG_S
    async with engines(2) as (a, b), running(redis, tmp_path, source, lease_s=long_s) as fleet:
        source.tell({"1": engine("a", a.url), "2": engine("b", b.url)})
        await until_live(redis, "a", "b")

        async def followed():
            source.tell({"1": engine("a", a.url)})
            return {*fleet.followers}

        await eventually(followed, lambda keys: keys == {"1"})


async def test_an_heir_follows_an_engine_that_its_answers_lack_until_it_answers(redis, tmp_path):
    source, partial = Told(), Told()
    async with engines(1) as (a,), running(redis, tmp_path / "1", source) as one:
        told = {"1": engine("a", a.url)}
        source.tell(told)
        await until_live(redis, "a")
        async with running(redis, tmp_path / "2", partial, lease_s=0.5, gone_s=LONG_S) as heir:
            partial.tell(told)
            await eventually(lambda: asyncio.sleep(0, heir.engines == told))
            a.faults = replace(a.faults, away_s=LONG_S)
            await one.stop()
            await eventually(lambda: asyncio.sleep(0, "1" in heir.followers))
            await acted_on(partial, heir, {}, times=3)
            assert "1" in heir.followers
            a.faults = replace(a.faults, away_s=0.0)
            await until_live(redis, "a")


async def test_an_engine_that_does_not_answer_is_gone_with_the_first_answer_that_lacks_it(
    redis, tmp_path
):
    source = Told()
    async with engines(2) as (a, b), running(redis, tmp_path, source, gone_s=LONG_S) as fleet:
        both = {"1": engine("a", a.url), "2": engine("b", b.url)}
        source.tell(both)
        await until_live(redis, "a", "b")
        b.faults = replace(b.faults, away_s=LONG_S)
        await until_live(redis, "a")
        assert fleet.followers.keys() == {"1", "2"}
        source.tell({"1": both["1"]})
        await eventually(lambda: asyncio.sleep(0, {*fleet.followers}), lambda keys: keys == {"1"})


async def test_an_engine_that_answers_and_is_not_well_yet_outlasts_answers_that_lack_it(
    redis, tmp_path
):
    source = Told()
    async with engines(1) as (a,), running(redis, tmp_path, source, gone_s=LONG_S) as fleet:
        a.faults = replace(a.faults, health_status=503)
        source.tell({"1": engine("a", a.url)})

        async def told():
            return "1" in fleet.followers and fleet.followers["1"].facts

        await eventually(told)
        await acted_on(source, fleet, {}, times=3)
        assert "1" in fleet.followers
        a.faults = replace(a.faults, health_status=200)
        await until_live(redis, "a")


async def test_a_name_that_comes_back_is_another_worker_at_once(redis, tmp_path):
    source = Told()
    async with engines(2) as (a, b), running(redis, tmp_path, source):
        source.tell({"uid-1": engine("a", a.url)})
        await until_live(redis, "a")
        a.faults = replace(a.faults, more_running=1)
        source.tell({"uid-2": engine("a", b.url)})

        async def address():
            return (await until_live(redis, "a"))["a"].address

        await eventually(address, lambda seen: seen == b.url)


async def test_an_engine_that_cannot_be_begun_with_leaves_the_others(redis, tmp_path):
    source = Told()
    async with engines(2) as (a, b), running(redis, tmp_path, source) as fleet:
        odd = engine("odd", b.url)
        odd = replace(odd, settings=replace(odd.settings, profile="h100"))
        source.tell({"0": odd, "1": engine("a", a.url)})
        await until_live(redis, "a")
        source.tell({"1": engine("a", a.url), "2": engine("b", b.url)})
        await until_live(redis, "a", "b")
        assert fleet.followers.keys() == {"1", "2"}


async def test_a_process_that_ends_leaves_its_engines_in_service(redis, tmp_path):
    source = Told()
    async with engines(2) as (a, b), running(redis, tmp_path, source) as fleet:
        source.tell({"1": engine("a", a.url), "2": engine("b", b.url)})
        await until_live(redis, "a", "b")
        await fleet.stop()
        assert fleet.followers == {}
        await until_live(redis, "a", "b")


async def test_an_agent_that_finds_no_engine_says_so_once(redis, tmp_path, caplog):
    source = Told()
    async with engines(1) as (a,), running(redis, tmp_path, source):
        for told in ({}, {}, {"1": engine("a", a.url)}, {}):
            source.tell(told)
            await eventually(lambda: asyncio.sleep(0, not source.changed.is_set()))
        assert caplog.text.count("no engine is found") == 2


async def test_an_agent_says_that_it_has_not_been_told_of_engines_for_long(
    redis, tmp_path, monkeypatch
):
    source = Told()
    async with engines(1) as (a,), running(redis, tmp_path, source, lease_s=0.3):
        source.tell({"1": engine("a", a.url)})

        async def findings():
            return (await until_live(redis, "a"))["a"].findings

        assert await findings() == ()
        monkeypatch.setattr(discovery, "STALE_S", 0.0)
        await eventually(findings, lambda seen: seen == (discovery.STALE,))
        monkeypatch.setattr(discovery, "STALE_S", 90.0)
        await eventually(findings, lambda seen: seen == ())


async def shared(one, other, number):
    """Until each is the agent of so many."""

    async def followed():
        return len(one.followers), len(other.followers)

    await eventually(followed, lambda seen: seen == (number, number))


async def test_processes_share_the_engines_and_take_over_those_of_one_that_dies(redis, tmp_path):
    source = Told()
    async with engines(4) as some, running(redis, tmp_path / "1", source, lease_s=5.0) as lasting:
        source.tell({str(i): engine(f"e{i}", one.url) for i, one in enumerate(some)})
        names = [f"e{i}" for i in range(4)]
        await until_live(redis, *names)
        async with running(redis, tmp_path / "2", source, lease_s=5.0) as dying:
            await shared(lasting, dying, 2)
            assert not lasting.followers.keys() & dying.followers.keys()
            await until_live(redis, *names)
        await shared(lasting, lasting, 4)
        await until_live(redis, *names)


async def test_engines_beyond_what_a_process_takes_are_told_until_another_takes_them(
    redis, tmp_path, caplog
):
    source = Told()
    dead = {f"d{i}": engine(f"d{i}", "http://127.0.0.1:9") for i in range(MAX_ENGINES + 9)}
    async with engines(1) as (a,), running(redis, tmp_path / "1", source, lease_s=1.0) as full:
        some = {"a": engine("a", a.url), **dict([*dead.items()][: MAX_ENGINES - 1])}
        source.tell(some)
        await eventually(lambda: asyncio.sleep(0, full.followers.keys() == some.keys()))
        assert full.findings() == ()
        source.tell({"a": some["a"], **dead})
        text = f"10 of {MAX_ENGINES + 10} engines have no agent: start another with the same flags"

        async def findings():
            """As doctor says them."""
            checks = of_findings((await live(redis)).values())
            return tuple(f"{check.found}: {check.remedy}" for check in checks)

        await eventually(
            findings, lambda seen: len(seen) == 1 and seen[0].startswith(f"a:0: {text}")
        )
        assert caplog.text.count(text) == 1
        async with running(redis, tmp_path / "2", source, lease_s=1.0):
            await eventually(findings, lambda seen: seen == ())


async def test_processes_that_are_told_of_some_engines_each_keep_theirs(redis, tmp_path):
    source, partial = Told(), Told()
    async with (
        engines(4) as some,
        running(redis, tmp_path / "1", source, lease_s=9.0) as one,
        running(redis, tmp_path / "2", partial, lease_s=9.0, gone_s=LONG_S) as other,
    ):
        told = {str(i): engine(f"e{i}", each.url) for i, each in enumerate(some)}
        source.tell(told)
        partial.tell(told)
        await shared(one, other, 2)
        await until_live(redis, "e0", "e1", "e2", "e3")
        kept = dict(other.followers)

        async def states():
            return {follower.state for follower in kept.values()}

        await eventually(states, lambda seen: seen == {"serving"})  # no longer handed over
        for key in kept:
            await acted_on(partial, other, {key: told[key]}, times=1)
        await acted_on(partial, other, told, times=1)
        assert kept.items() <= other.followers.items()


async def test_an_engine_that_begins_to_leave_after_its_agent_ended_is_drained_by_the_heir(
    redis, tmp_path
):
    source = Told()
    async with engines(1) as (a,):
        told = engine("a", a.url)
        told = replace(told, settings=replace(told.settings, lease_ttl_s=10 * LONG_S))
        source.tell({"1": told})
        async with running(redis, tmp_path / "1", source) as ending:
            await until_live(redis, "a")
            await ending.stop()
        source.tell({"1": replace(told, leaving=True)})
        async with running(redis, tmp_path / "2", source) as heir:
            await until_live(redis)  # before its lease ends
            assert heir.followers == {}


async def test_while_redis_is_away_each_process_goes_on(own_redis_server, tmp_path):
    source = Told()
    async with (
        connect(own_redis_server.url) as redis,
        engines(1) as (a,),
        running(redis, tmp_path, source, lease_s=0.3) as fleet,
    ):
        source.tell({"1": engine("a", a.url)})
        await until_live(redis, "a")
        follower = fleet.followers["1"]
        with stopped(own_redis_server.pid):
            source.tell({"1": replace(engine("a", a.url), ready=False)})
            await eventually(lambda: asyncio.sleep(0, fleet.engines == source.engines))
        await until_live(redis, "a")
        assert fleet.followers == {"1": follower}
