"""Where the pages of docs/ are on this machine, for messages that name one."""

from __future__ import annotations

from pathlib import Path

_INSTALLED = Path(__file__).parents[1] / "docs"
_IN_A_CHECKOUT = Path(__file__).parents[2] / "docs"
_FOLDER = _INSTALLED if _INSTALLED.is_dir() else _IN_A_CHECKOUT


def page(name: str) -> str:
    """The path of a page, such as `operating.md`."""
    return str(_FOLDER / name)
