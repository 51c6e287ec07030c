"""One line of `kvroute doctor`, and the paths of the pages that it names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check. about: what was checked. ok: None if that could not be found out.
    remedy: what to do if `ok` is False."""

    about: str
    ok: bool | None
    found: str
    remedy: str = ""


_INSTALLED = Path(__file__).parents[1] / "docs"
_IN_A_CHECKOUT = Path(__file__).parents[2] / "docs"
_FOLDER = _INSTALLED if _INSTALLED.is_dir() else _IN_A_CHECKOUT


def page(name: str) -> str:
    """Returns the path of a page, such as `operating.md`."""
    return str(_FOLDER / name)
