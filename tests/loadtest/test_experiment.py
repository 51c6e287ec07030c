"""The command that plays rows and prints a table."""

import numpy as np
import orjson
from click.testing import CliRunner

from loadtest.experiment import experiment, option

COLUMNS = (
    ("share", "share", "{:.1%}"),
    ("seed", "seed", "{:.2f}"),
    ("only b", "only", "{:g}"),
    ("nobody's", "none", "{:g}"),
)


def rows(scale):
    return {
        "first": {"a | 1": lambda seed: {"share": 0.5, "seed": scale * seed}},
        "second": {
            "a | 1": lambda seed: {"share": 1, "seed": seed, "only": None},
            "b | 2": lambda seed: {"share": 0, "seed": seed, "only": 7, "none": None},
        },
    }


def test_figures_are_the_middle_of_the_seeds_and_absent_ones_leave_no_column(tmp_path):
    main = experiment(rows, COLUMNS, option("--scale", 10), labels="one | two", middle=np.median)
    file = tmp_path / "f.json"
    ended = CliRunner().invoke(main, ["--seeds", "4", "--jobs", "2", "--json", str(file)])
    assert ended.output.splitlines() == [
        "",
        "first",
        "",
        "| one | two | share | seed |",
        "|---|---|---|---|",
        "| a | 1 | 50.0 % | 15.00 |",
        "",
        "second",
        "",
        "| one | two | share | seed | only b |",
        "|---|---|---|---|---|",
        "| a | 1 | 100.0 % | 1.50 | - |",
        "| b | 2 | 0.0 % | 1.50 | 7 |",
    ]
    played = orjson.loads(file.read_bytes())
    assert [one["seed"] for one in played["first"]["a | 1"]] == [0, 10, 20, 30]
