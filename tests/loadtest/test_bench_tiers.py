import pytest
from click import ClickException
from rich.console import Console

from loadtest.bench_tiers import PAIRS, measure, show
from workers.kv.copies import Copies


def test_every_pair_of_tiers_is_measured_alongside_a_plain_copy(tmp_path):
    result = measure([16], mib=1, rounds=1, folder=tmp_path)
    assert len(result["pairs"]) == len(PAIRS) == 5
    for sizes in result["pairs"].values():
        assert sizes.keys() == {"16"}
        assert all(figure > 0 for found in sizes.values() for figure in found.values())
    assert list(tmp_path.iterdir()) == []
    console = Console(record=True, width=120)
    show(result, console)
    assert console.export_text().count("device") >= 4


def test_copies_that_bring_something_else_end_the_benchmark(tmp_path, monkeypatch):
    monkeypatch.setattr(Copies, "carry_out", lambda _, move: len(move.blocks))
    with pytest.raises(ClickException, match="copies from DEVICE to HOST are wrong"):
        measure([16], mib=1, rounds=1, folder=tmp_path)
