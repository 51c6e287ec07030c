"""The table of fixed splits, of the price, and of neither."""

import orjson
from click.testing import CliRunner

from loadtest.experiments.splits import main

SMALL = ("--requests", "60", "--load", "1.2", "--link-gbit", "400", "--roles", "2p6d")


def test_each_row_splits_as_it_says(tmp_path):
    file = tmp_path / "splits.json"
    ended = CliRunner().invoke(main, [*SMALL, "--seeds", "2", "--json", str(file)])
    assert ended.exit_code == 0, ended.output
    (played,) = orjson.loads(file.read_bytes()).values()
    names = ("2p6d", "splits", "and fetches")
    assert list(played) == ["all local", *(f"{name}, 400 Gbit/s" for name in names)]
    local, fixed, whole, _ = played.values()
    assert all(one["split"] is one["fetched"] is None for one in local)
    assert all(one["split"] > 0 == one["fetched"] for one in fixed)
    assert all(one["fetched"] == 0 for one in whole)


def test_splits_of_different_numbers_of_workers_are_not_compared():
    refused = CliRunner().invoke(main, [*SMALL, "--roles", "3p6d"])
    assert (refused.exit_code, "different numbers of workers" in refused.output) == (2, True)
