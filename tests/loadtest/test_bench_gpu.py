from rich.console import Console

from loadtest import bench_gpu
from loadtest.bench_gpu import PARTS, Part, measure, show


def wrote(text):
    """A benchmark that is Python's own."""
    return Part("small", f"timeit -n1 -r1 open('{{out}}/f','w').write('{text}')", "f", 60.0)


def test_each_benchmark_has_a_limit_and_all_end_within_eight_minutes():
    assert sum(part.limit_s + bench_gpu.TERMINATE_S for part in PARTS) <= 8 * 60 + 30
    assert [part.limit_s for part in PARTS] == sorted(part.limit_s for part in PARTS)
    assert sum(part.limit_s for part in PARTS) <= 8 * 60


def test_a_benchmark_that_fails_or_hangs_costs_its_own_figures_only():
    parts = (
        wrote("[1,3,2]"),
        Part("broken", "loadtest.no_such_module", "f", 60.0),
        Part("hangs", "http.server --bind 127.0.0.1 0", "f", 0.5),
    )
    result = measure("cpu", parts)["parts"]
    assert result["small"] == [1, 3, 2]
    assert result["broken"] == {"error": "it ended with 1"}
    assert result["hangs"] == {"error": "it took more than 0.5 s"}


def test_what_is_printed_names_the_card_and_what_was_not_measured():
    console = Console(record=True, width=100)
    parts = {"one": {"rate": 2.5}, "two": {"error": "it hung"}}
    show({"conditions": "A card, 2026-01-01.", "parts": parts}, console)
    text = console.export_text()
    for shown in ("A card, 2026-01-01.", 'one: {"rate":2.5}', "two: not measured: it hung"):
        assert shown in text
