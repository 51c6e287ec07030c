from __future__ import annotations

from click.testing import CliRunner

from loadtest.bench_plan import FORMS, main, query_of, view_of
from tests.policy.test_plan import plan


def test_plans_are_timed_with_and_without_sources() -> None:
    result = CliRunner().invoke(main, ["--rounds", "1"])
    assert result.exit_code == 0
    assert all(name in result.output for name in ("held by nobody", *FORMS))


def test_one_of_the_plans_that_are_timed_fetches_and_the_others_do_not() -> None:
    fetching = [
        (way, holders)
        for way in FORMS.values()
        for holders in (0, 1, 8)
        if plan(query_of(holders), view_of(8, way)).decision.source is not None
    ]
    assert fetching == [("kvroute", 1)]
