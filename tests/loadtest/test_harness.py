from functools import partial
from io import StringIO

import orjson
from click.testing import CliRunner
from rich.console import Console

from loadtest.command import option
from loadtest.harness import bench, grid, in_turn, medians, percentiles


def test_ways_take_turns_backwards_every_second_round_and_the_first_round_only_warms_up():
    calls = []

    def way(name):
        calls.append(name)
        return len(calls)

    made = in_turn({name: partial(way, name) for name in "ab"}, rounds=2)
    assert "".join(calls) == "abbaab"
    assert made == {"a": [4, 5], "b": [3, 6]}


def test_medians_are_of_each_number_of_nested_results():
    rounds = [{"a": {"x": n, "y": -n}, "b": n * n} for n in (1, 5, 2)]
    assert medians(rounds) == {"a": {"x": 2.0, "y": -2.0}, "b": 4.0}


def test_percentiles_are_named():
    assert percentiles([1.0, 2.0, 3.0], 50, 100) == {"p50": 2.0, "p100": 3.0}


def test_a_grid_writes_figures_as_their_columns_say():
    shown = StringIO()
    rows = [(["one"], {"s": 0.1234, "n": {"all": 1000}})]
    Console(file=shown).print(grid(["kind"], {"took": "{s:.2f} s", "all": "{n[all]:,}"}, rows))
    for text in ("kind", "took", "0.12 s", "1,000"):
        assert text in shown.getvalue()


def test_a_bench_writes_its_figures_and_shows_them(tmp_path):
    async def measure(rounds):
        return {"twice": 2 * rounds}

    def show(result, console):
        console.print(f"twice as many: {result['twice']}")

    file = tmp_path / "figures.json"
    main = bench(measure, show, option("--rounds", 3))
    done = CliRunner().invoke(main, [f"--json={file}"])
    assert done.output == "twice as many: 6\n"
    assert orjson.loads(file.read_bytes()) == {"twice": 6}
