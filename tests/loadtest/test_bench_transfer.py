import pytest
from click import ClickException
from rich.console import Console

from loadtest import bench_transfer
from loadtest.bench_transfer import KINDS, measure_with, prompt_of, running, settings_of, show
from workers.kv.transfer.tcp import BlockSource

SETTINGS = settings_of("cpu", None, 300)


@pytest.mark.slow
async def test_the_target_answers_alone_and_with_what_the_source_hands_on():
    figures = await measure_with(SETTINGS, tokens=300, rounds=1)
    assert [figures[kind]["fetched_tokens"] for kind in KINDS] == [0, 256, 128]
    console = Console(record=True, width=100)
    show(figures, console)
    assert "1.000" in console.export_text()


class _GoneSource:
    """Keeps something where nobody listens."""

    def answer(self, prompt, kind=""):
        return bench_transfer.TransferAnswer(0.0, [], 0, BlockSource("127.0.0.1", 1, "gone", 256))


@pytest.mark.slow
async def test_a_prompt_that_was_computed_instead_of_fetched_ends_the_benchmark():
    source = _GoneSource()
    async with running(SETTINGS) as engine:
        with pytest.raises(ClickException, match="split: 0 of 256 tokens came"):
            await bench_transfer._round(engine, source, "split", prompt_of(0, 300), 128)
