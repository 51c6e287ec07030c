import click
import pytest

from loadtest import bench_door
from loadtest.bench_door import COMPARED, HERE, measure, measure_beside, shapes

pytestmark = pytest.mark.slow


def test_the_door_is_measured_beside_a_proxy(own_redis_server):
    # Fewer could take a process less than the hundredth of a second in which Linux counts.
    found = measure(own_redis_server.url, requests=500, rounds=1)
    assert list(found["cost"]) == [shape.name for shape in shapes()]
    for made in found["cost"].values():
        assert made["door"]["per_s"] > 0
        assert made["proxy"]["per_s"] > 0


def test_prompts_have_the_sizes_that_are_said():
    for shape, size in zip(shapes(), (800, 32_000, 800, 800), strict=True):
        assert all(abs(len(body) - size) < 120 for body in shape.bodies)
        assert len(shape.bodies) == bench_door.NUM_PROMPTS


def test_the_doors_of_two_checkouts_are_measured_in_turn():
    found = measure_beside(HERE, requests=300, rounds=1)
    assert list(found) == list(COMPARED)
    for numbers in found.values():
        assert numbers["other_us"] > 0
        assert numbers["times"] == pytest.approx(numbers["here_us"] / numbers["other_us"])


def test_a_checkout_that_cannot_register_a_worker_is_named(tmp_path):
    (tmp_path / "loadtest").mkdir()
    (tmp_path / "loadtest/__init__.py").write_text("raise SystemExit('too old')")
    with pytest.raises(click.ClickException, match=f"{tmp_path} cannot .*: too old"):
        measure_beside(tmp_path, requests=1, rounds=1)
