"""A line of `kvroute doctor`, and where the pages are that it names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Check:
    """about: what was looked at. ok: None if that could not be found out. remedy: what to do if it
    is not ok."""

    about: str
    ok: bool | None
    found: str
    remedy: str = ""


_INSTALLED = Path(__file__).parents[1] / "docs"
_IN_A_CHECKOUT = Path(__file__).parents[2] / "docs"
_FOLDER = _INSTALLED if _INSTALLED.is_dir() else _IN_A_CHECKOUT


def page(name: str) -> str:
    """The path of a page, such as `operating.md`."""
    return str(_FOLDER / name)
