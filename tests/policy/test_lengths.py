"""Engines of one model may take prompts of different lengths: a request goes where it fits."""

from dataclasses import replace

import numpy as np
import pytest

from app.core.errors import AllWorkersBusy, NoWorkers, PromptTooLarge
from app.core.loads import Load
from app.core.roles import Role
from app.core.types import TierOverlap
from app.policy.locality import Locality
from app.policy.policies import POLICIES
from app.policy.transfer import TransferKind
from tests.policy.test_plan import plan, query, worker
from tests.policy.test_transfer import able, fleet
from tests.policy.test_view import ONE, TWO, info

SHORT, LONG = 300, 8000


def engine(name, max_model_len, **more):
    return replace(info(name, 4), max_model_len=max_model_len, **more)


def chosen(*infos, loads=(), **asked):
    return worker(plan(query(**asked), fleet(*infos, loads=loads)))


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_chooses_an_engine_that_a_request_does_not_fit_into(policy):
    busy = [Load(), Load(requests=3, prefill_us=9_000_000, blocks=900), Load()]
    infos = [engine("a", SHORT), engine("b", LONG), engine("c", SHORT)]
    for held in ({}, {ONE: TierOverlap(6)}):
        asked = query(held, policy=policy, context_tokens=SHORT + 1)
        assert worker(plan(asked, fleet(*infos, loads=busy))) == "b"
        assert worker(plan(asked, fleet(*infos, loads=busy), degraded=True)) == "b"


def test_one_that_just_fits_and_one_that_does_not_say_how_many_it_takes_may_be_chosen():
    infos = [engine("a", SHORT), engine("b", LONG)]
    assert chosen(*infos, loads=[Load(), Load(requests=1)], context_tokens=SHORT) == "a"
    infos = [engine("a", SHORT), engine("b", 0)]
    assert chosen(*infos, context_tokens=10**6) == "b"
    assert chosen(engine("a", SHORT), context_tokens=0) == "a"


def test_what_fits_nowhere_is_too_large_and_what_fits_elsewhere_finds_no_worker():
    infos = [engine("a", SHORT), engine("b", LONG)]
    with pytest.raises(PromptTooLarge, match=r"8,001 tokens fit into no worker.* 8,000"):
        chosen(*infos, context_tokens=LONG + 1)
    with pytest.raises(NoWorkers, match="fit only into workers that get no requests"):
        chosen(*infos, context_tokens=LONG, exclude=frozenset({"b"}))
    view = fleet(engine("a", SHORT))
    view.paused = {TWO: engine("b", LONG)}
    with pytest.raises(NoWorkers, match="fit only into workers that get no requests"):
        plan(query(context_tokens=LONG), view)
    with pytest.raises(NoWorkers, match=r"excludes all live workers \(2\)"):
        chosen(*infos, context_tokens=LONG, exclude=frozenset({"a", "b"}))
    with pytest.raises(AllWorkersBusy):
        chosen(*infos, loads=[Load(), Load(requests=4)], context_tokens=LONG)


def test_a_source_needs_room_for_the_prompt_alone_and_a_target_for_the_answer_too():
    def route(source, target):
        prefill = replace(able("a", Role.PREFILL), max_model_len=source)
        decode = replace(able("b", Role.DECODE), max_model_len=target)
        asked = query(tokens=200, context_tokens=500, output_tokens=300)
        decision = plan(asked, fleet(prefill, decode), strict_roles=True).decision
        assert decision.source is not None
        assert decision.source.kind is TransferKind.SPLIT
        return decision.source.worker.key.worker_id, decision.worker.key.worker_id

    assert route(201, 500) == ("a", "b")
    with pytest.raises(NoWorkers, match="roles are strict"):
        route(200, 500)
    with pytest.raises(PromptTooLarge, match="none takes more than 499"):
        route(201, 499)


def test_what_a_shorter_engine_holds_of_a_prompt_does_not_draw_it_there():
    infos = [engine("a", SHORT), engine("b", LONG)]
    asked = query({ONE: TierOverlap(18)}, tokens=320, context_tokens=336, explain=True)
    decision = plan(asked, fleet(*infos)).decision
    assert decision.worker.key.worker_id == "b"
    assert (decision.locality, decision.best.worker) == (Locality.FULL, "a:0")
    assert [candidate.eligible for candidate in decision.candidates] == [False, True]


def test_one_that_fails_requests_is_asked_where_no_other_takes_as_many_tokens():
    view = fleet(engine("a", SHORT), engine("b", LONG))
    view.failed_shares = np.array([0.0, 0.9])
    assert worker(plan(query(context_tokens=SHORT), view)) == "a"
    assert worker(plan(query(context_tokens=LONG), view)) == "b"
