from loadtest.experiments.strains import ROWS, Row, play
from loadtest.traffic import TRAFFIC, made_trace


def test_there_is_a_row_for_all_traffic():
    assert {row.traffic for row in ROWS} == TRAFFIC.keys()


def test_a_row_may_be_of_some_requests_alone():
    trace = made_trace("jobs").cut(39.9, 1.0)

    def waits(only):
        return play(Row("few", "jobs", priorities=True, only=only), trace, "latency", 0)

    chats, jobs, longest = waits("normal"), waits("low"), "ttft_longest_s"
    assert chats["ttft_mean_s"] < jobs["ttft_mean_s"]
    assert chats[longest] < jobs[longest] == waits("")[longest]
