from __future__ import annotations

from loadtest.strains import ROWS, Row, Waits, cells, made, simulate
from loadtest.traffic import TRAFFIC


def test_there_is_a_row_for_all_traffic() -> None:
    assert {row.traffic for row in ROWS} == TRAFFIC.keys()


def test_a_row_may_be_of_some_requests_alone() -> None:
    trace = made("jobs").cut(39.0, 6.0)

    def waits(only: str) -> Waits:
        return simulate(Row("few", "jobs", priorities=True, only=only), trace, "latency", 0)

    chats, jobs = waits("normal"), waits("low")
    assert chats.ttft_mean < jobs.ttft_mean
    assert chats.ttft_longest < jobs.ttft_longest == waits("").ttft_longest


def test_a_line_of_the_table_has_means_of_seeds() -> None:
    row = Row("few", "jobs")
    seeds = [Waits(1.0, 2.0, 3.0, 4.0, 0.5), Waits(2.0, 3.0, 4.0, 5.0, 1.0)]
    assert cells(row, "logit", seeds) == "| few | `logit` | 1.500 | 2.50 | 3.5 | 4.50 | 75.0 % |"
