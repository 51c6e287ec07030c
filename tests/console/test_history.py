"""The curves and the heat map, of samples as replicas write them."""

import orjson

from app.console.sampler import (
    HEAT_COLUMNS,
    HEAT_WORKERS,
    MAX_QUEUES,
    heat,
    means,
    of_worker,
    shown,
)


def sample(at_s, **values):
    return at_s * 1000, values


def test_a_series_has_a_value_for_each_time_or_null():
    found = shown([sample(5, waiting=1, workers=2), sample(10, waiting="many")], 5)
    assert found == {
        "step_s": 5,
        "at_s": [5, 10],
        "series": {"waiting": [1, None], "workers": [2, None]},
    }


def test_a_heat_map_is_of_means_and_leaves_out_who_was_not_there():
    times = range(2 * HEAT_COLUMNS)
    samples = [
        sample(5 * n, queues={"a": float(n % 2), **({"b": 4.0} if n < 2 else {})}) for n in times
    ]
    found = heat(samples)
    assert found["at_s"] == [10 * n for n in range(HEAT_COLUMNS)]
    assert found["workers"]["a"] == [0.5] * HEAT_COLUMNS
    assert found["workers"]["b"] == [4.0] + [None] * (HEAT_COLUMNS - 1)
    assert heat([]) == {"at_s": [], "workers": {}}
    sizes = {59: 59, 60: 60, 61: 31, 119: 60, 121: 41}
    assert {n: len(heat([sample(5 * at) for at in range(n)])["at_s"]) for n in sizes} == sizes


def test_with_many_workers_the_heat_map_has_the_longest_queues_and_stays_small():
    queues = {f"worker-{n:03}:0": n + 0.123 for n in range(MAX_QUEUES)}
    samples = [sample(5 * n, queues=queues) for n in range(720)]
    found = heat(samples)
    assert len(found["workers"]) == HEAT_WORKERS
    assert min(found["workers"]) == f"worker-{MAX_QUEUES - HEAT_WORKERS:03}:0"
    series = shown([sample(5 * n, **dict.fromkeys("abcdefghijklm", 0.1234)) for n in range(720)], 5)
    assert len(orjson.dumps(series | {"heat": found})) < 200_000


def test_a_worker_has_its_queue_over_time():
    samples = [sample(5, queues={"a": 1.5}), sample(10, queues={}), sample(15)]
    assert of_worker(samples, "a") == {"at_s": [5, 10, 15], "queue_s": [1.5, None, None]}


def test_the_mean_of_a_minute_is_of_what_is_known():
    samples = [{"a": 1.0, "b": None, "queues": {"w": 1}}, {"a": 2.0, "b": None}]
    assert means(samples) == {"a": 1.5, "b": None}
