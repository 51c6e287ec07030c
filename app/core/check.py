"""A line of `kvroute doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """about: what was looked at. ok: None if that could not be found out. remedy: what to do if it
    is not ok."""

    about: str
    ok: bool | None
    found: str
    remedy: str = ""
