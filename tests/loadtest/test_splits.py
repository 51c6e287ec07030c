"""The table of fixed splits, of the price, and of neither."""

from __future__ import annotations

from pathlib import Path

import orjson
from click.testing import CliRunner

from loadtest.splits import main

SMALL = ("--requests", "60", "--load", "1.2", "--link-gbit", "400", "--roles", "2p6d")


def test_each_row_has_the_medians_of_its_seeds_and_splits_as_it_says(tmp_path: Path) -> None:
    file = tmp_path / "splits.json"
    ended = CliRunner().invoke(main, [*SMALL, "--seeds", "3", "--json", str(file)])
    assert ended.exit_code == 0, ended.output
    lines = [line for line in ended.output.splitlines() if line.startswith("|")][2:]
    cells = {name.strip(): rest for _, name, *rest in (line.split("|") for line in lines)}
    names = ("2p6d", "splits", "and fetches")
    assert list(cells) == ["all local", *(f"{name}, 400 Gbit/s" for name in names)]
    ((load, played),) = orjson.loads(file.read_bytes()).items()
    assert load == "1.2"
    for name, seeds in played.items():
        ttft_s = sorted(one["summary"]["ttft_mean_s"] for one in seeds)
        assert float(cells[name][0]) == round(ttft_s[1], 2)
    local, fixed, whole, _ = played.values()
    assert all(one["split"] == one["fetched"] == 0 for one in local)
    assert all(one["split"] > 0 == one["fetched"] for one in fixed)
    assert all(one["fetched"] == 0 for one in whole)


def test_splits_of_different_numbers_of_workers_are_not_compared() -> None:
    refused = CliRunner().invoke(main, [*SMALL, "--roles", "3p6d"])
    assert (refused.exit_code, "different numbers of workers" in refused.output) == (2, True)
