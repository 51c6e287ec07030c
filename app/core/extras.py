"""What a plain install leaves out, and what to type to have it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from app.core.errors import MissingPackage

OURS = frozenset(("app", "lua", "workers", "loadtest", "deploy"))


@contextmanager
def extra(name: str, reason: str = "") -> Iterator[None]:
    """Around each import that needs what only this extra of pyproject.toml installs.

    reason: what asks for it, where no command does.
    Raises MissingPackage in place of ModuleNotFoundError. That tests/test_extras.py finds each such
    import in a block of this is what keeps tracebacks from users.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in OURS:  # a fault of ours, which no install mends
            raise
        raise MissingPackage(package, name, reason) from None
