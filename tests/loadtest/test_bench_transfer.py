import pytest
from rich.console import Console

from loadtest.bench_transfer import KINDS, measure_with, settings_of, show

SETTINGS = settings_of("cpu", None, 300)


@pytest.mark.slow
async def test_the_target_answers_alone_and_with_what_the_source_hands_on():
    figures = await measure_with(SETTINGS, tokens=300, rounds=1)
    assert [figures[kind]["fetched_tokens"] for kind in KINDS] == [0, 256, 128]
    console = Console(record=True, width=100)
    show(figures, console)
    assert "1.000" in console.export_text()
