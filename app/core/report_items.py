"""The fields of what workers say of themselves, and all that other code knows of each."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One field of a report. default: None if there is none."""

    name: str
    annotation: Any
    kind: type[Any]
    """The annotation without None."""
    default: Any
    help: str
    wire: str
    """Its name in Redis."""
    answer: str
    """Its name in GET /v1/workers; "": it is not there."""
    gauge: str
    """Its gauge at routers, without kvroute_worker_; "": it has none."""
    least: int = 0
    text: str = ""
    """How `kvroute inspect worker` shows the value; "": not at all."""
    noun: str = ""
    """What is counted."""
    per: float = 1
    """The unit that `text` shows the value in."""


def said(help_text: str, default: Any = MISSING, **about: Any) -> Any:
    """A field of a report. about: see Item; by default all names are the field's own."""
    return field(default=default, metadata={"help": help_text, **about})


def items_of(cls: type, prefix: str = "", *, gauges: bool = False) -> tuple[Item, ...]:
    """The fields of `cls`. prefix: of their names in Redis and gauges. gauges: all have one."""
    hints = get_type_hints(cls)
    items = []
    for f in fields(cls):
        optional = get_origin(hints[f.name]) is UnionType
        kinds = [kind for kind in get_args(hints[f.name]) if kind is not NoneType and optional]
        named: dict[str, Any] = {
            "wire": prefix + f.name,
            "answer": f.name,
            "gauge": prefix + f.name if gauges else "",
            "text": f"{f.name} {{}}",
        }
        [kind] = kinds or [hints[f.name]]
        items.append(
            Item(
                name=f.name,
                annotation=hints[f.name],
                kind=kind,
                default=None if f.default is MISSING else f.default,
                **(named | f.metadata),
            )
        )
    return tuple(items)
