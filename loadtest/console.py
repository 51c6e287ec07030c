"""Where commands print figures."""

from __future__ import annotations

from typing import Any

from rich import console
from rich.console import Group
from rich.table import Table

_WIDEST = 1000


class Console(console.Console):
    """Cuts no figure: tables that need more than its width get it, as in a terminal of 80
    characters, or where the output goes to a file."""

    def print(self, *objects: Any, **more: Any) -> None:
        room = self.options.update(width=_WIDEST)
        parts = [
            p for one in objects for p in (one.renderables if isinstance(one, Group) else [one])
        ]
        needed = (self.measure(p, options=room).maximum for p in parts if isinstance(p, Table))
        self.width = max(self.width, *needed, 0)
        super().print(*objects, **more)
