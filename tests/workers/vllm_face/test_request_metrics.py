from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from app.simulation.steps import Finished, Step
from workers.vllm_face.request_metrics import RequestMetrics


class Watched:
    """Metrics on a clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.registry = CollectorRegistry()
        self.metrics = RequestMetrics(
            self.registry, {"model_name": "m", "engine": "0"}, lambda: self.now_s
        )

    def step(self, ends_s: float, seconds: float, **said: list[object]) -> None:
        said = {"emitted": [], "first_tokens": [], "finished": [], "begun": []} | said
        self.now_s = ends_s
        self.metrics.stepped(Step(seconds, 0.0, 0, 0, 0.0, 0, 0, **said), seconds)  # type: ignore[arg-type]

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(
            f"vllm:{name}", {"model_name": "m", "engine": "0", **labels}
        )


def test_the_times_of_a_request_are_told_apart() -> None:
    """It arrives at 1 s, its prompt takes two steps from 3 s to 7 s, and its next token 2 s."""
    watched = Watched()
    watched.now_s = 1.0
    watched.metrics.arrived("r", 10)
    watched.step(5.0, 2.0, begun=[("r", 4)])
    watched.step(7.0, 2.0, emitted=["r"], first_tokens=["r"])
    watched.now_s = 9.0
    watched.metrics.left("r")
    watched.step(9.0, 2.0, emitted=["r"], finished=[Finished("r", 10, 4, 2)])

    seconds = {
        name: watched.value(f"{name}_seconds_sum")
        for name in (
            *("request_queue_time", "request_prefill_time", "time_to_first_token"),
            *("request_decode_time", "inter_token_latency", "e2e_request_latency"),
        )
    }
    assert [*seconds.values()] == [2.0, 4.0, 6.0, 2.0, 2.0, 8.0]
    assert watched.value("request_success_total", finished_reason="length") == 1
    assert watched.value("request_prefill_kv_computed_tokens_sum") == 6


def test_a_request_that_was_cancelled_counts_its_tokens_but_not_as_finished() -> None:
    watched = Watched()
    watched.metrics.arrived("r", 10)
    watched.step(1.0, 1.0, begun=[("r", 4)], emitted=["r"], first_tokens=["r"])
    watched.metrics.left("r")
    watched.step(2.0, 1.0)
    assert watched.value("generation_tokens_total") == 1
    assert watched.value("prompt_tokens_total") == 10
    assert watched.value("e2e_request_latency_seconds_count") == 0


@pytest.mark.parametrize("is_in_step", [True, False])
def test_an_id_used_again_within_a_step_is_not_mistaken_for_the_new_request(
    is_in_step: bool,
) -> None:
    watched = Watched()
    watched.metrics.arrived("r", 10)
    watched.metrics.left("r")
    watched.metrics.arrived("r", 20)
    if is_in_step:
        watched.step(1.0, 1.0, begun=[("r", 0)], emitted=["r"], first_tokens=["r"])
        assert watched.value("prompt_tokens_total") == 10
    else:
        watched.step(1.0, 1.0)
    watched.step(2.0, 1.0, begun=[("r", 0)], emitted=["r"], first_tokens=["r"])
    assert watched.value("prompt_tokens_total") == (30 if is_in_step else 20)


def test_a_request_whose_predecessor_of_the_same_id_left_just_before_its_step_is_left_out() -> None:
    watched = Watched()
    watched.metrics.arrived("r", 10)
    watched.metrics.left("r")
    watched.metrics.arrived("r", 20)
    watched.step(1.0, 1.0, begun=[("r", 0)], emitted=["r"], first_tokens=["r"])
    watched.metrics.left("r")
    watched.step(2.0, 1.0, emitted=["r"], finished=[Finished("r", 20, 0, 2)])
    assert watched.value("inter_token_latency_seconds_count") == 0
    assert watched.value("e2e_request_latency_seconds_count") == 0
