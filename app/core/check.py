"""A line of `kvroute doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """about: what was looked at. remedy: what to do if it is not ok."""

    about: str
    ok: bool
    found: str
    remedy: str = ""
