"""Fields of workers' reports, with all that other code knows of each."""

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
    default: Any
    help: str
    wire: str
    """Name in Redis."""
    answer: str
    """Name in GET /v1/workers; "": absent."""
    gauge: str
    """Gauge at routers, without kvroute_worker_; "": none."""
    least: int = 0
    text: str = ""
    """Format of the value in `kvroute inspect worker`; "": not shown."""
    noun: str = ""
    per: float = 1
    """Unit in which `text` shows the value."""


def said(help_text: str, default: Any = MISSING, **about: Any) -> Any:
    """Returns a dataclass field of a report. about: members of Item; names default to the field's
    own."""
    return field(default=default, metadata={"help": help_text, **about})


def items_of(cls: type, prefix: str = "", *, gauges: bool = False) -> tuple[Item, ...]:
    """Returns the fields of `cls`. prefix: of their names in Redis and gauges. gauges: all have
    one."""
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
