"""Figures in terminals that are too narrow for them."""

import io

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from loadtest.command import Console

FIGURES = [f"{at}.234567" for at in range(12)]


@pytest.mark.parametrize("width", [40, 80, 400])
@pytest.mark.parametrize("is_grouped", [True, False])
def test_no_figure_is_cut(width, is_grouped):
    cells = Table("TTFT mean, s", *(f"policy_{at}" for at in range(12)))
    cells.add_row("whole request", *FIGURES)
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(Group(Text("conversation-demo"), cells) if is_grouped else cells)
    text = console.export_text()
    assert all(figure in text for figure in FIGURES)
    assert "…" not in text
