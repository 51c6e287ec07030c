"""Errors that say which extra to install when a package is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from app.core.errors import MissingPackage

OURS = frozenset(("app", "lua", "workers", "loadtest", "deploy"))


@contextmanager
def extra(name: str, reason: str = "") -> Iterator[None]:
    """Wraps an import that only this extra of pyproject.toml makes possible. reason: what asks for
    the package, if no command does. Raises MissingPackage in place of ModuleNotFoundError.
    tests/test_extras.py finds imports of extras that are not wrapped."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in OURS:  # a fault of ours, which no install mends
            raise
        raise MissingPackage(package, name, reason) from None
