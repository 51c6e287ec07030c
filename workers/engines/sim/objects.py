"""Objects made up from a JSON Schema: what a simulated model writes where it is told a form."""

from __future__ import annotations

from collections.abc import Mapping
from operator import ge, gt, le, lt
from typing import Any

from app.core.errors import InvalidRequest, shown
from app.http.json_body import dumps
from workers.engines.sim.text import WORDS

MAX_DEPTH = 24
MAX_WORK = 250_000
"""Members of schemas that are looked at, and characters that are made up, all in all: some 50 ms.
A schema of 3 kB can stand for one of any size."""
A_STEP = 25
"""What each schema costs, beside its members."""
_TEXT = " ".join(WORDS[:2])
_FORMATS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "email": "fox@example.com",
    "uri": "https://example.com/",
    "uuid": "123e4567-e89b-42d3-a456-426614174000",
}
_BOUNDS = {"minimum": ge, "maximum": le, "exclusiveMinimum": gt, "exclusiveMaximum": lt}
_UNKNOWN = (
    *("allOf", "not", "if", "dependentSchemas", "patternProperties", "minProperties"),
    *("prefixItems", "contains", "pattern", "multipleOf"),
)
"""What nothing is made up for."""


def made_up(schema: object, field: str) -> Any:
    """A value that the schema allows. Where that is an object it has all that it may, but what is
    within has no more than is required, and null where it may be: schemas contain themselves.
    Raises InvalidRequest, which names `field`, if there is none or it is not found."""
    return _Maker(schema, field).value(schema, 0)


class _Maker:
    def __init__(self, root: object, field: str) -> None:
        self._root = root
        self._field = field
        self._work = 0

    def value(self, schema: Any, depth: int) -> Any:
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise self._bad(f"needs a schema, got {shown(schema)}")
        if depth > MAX_DEPTH:
            raise self._bad("refers to itself, or nests too deeply")
        self._spend(A_STEP + len(schema))
        for name in _UNKNOWN:
            if name in schema:
                raise self._bad(f"nothing is made up for {name!r} in a schema")
        instead = self._instead(schema)
        if instead is not None:
            return self.value(instead, depth + 1)
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list) and listed:
            self._spend(len(dumps(listed[0], self._field)))
            return listed[0]
        kinds = schema.get("type", "object" if "properties" in schema else "string")
        if isinstance(kinds, list) and kinds:
            kinds = "null" if "null" in kinds else kinds[0]
        match kinds:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "integer" | "number" as kind:
                return self._numeric(schema, is_whole=kind == "integer")
            case "boolean":
                return True
            case "null":
                return None
        raise self._bad(f"has a type {shown(kinds)}")

    def _spend(self, work: int) -> None:
        """Before it is done."""
        self._work += work
        if self._work > MAX_WORK:
            raise self._bad("takes too long to be made sense of")

    def _instead(self, schema: Mapping[str, Any]) -> object:
        """What it stands for; None: itself."""
        options = schema.get("anyOf", schema.get("oneOf"))
        if "$ref" not in schema and options is None:
            return None
        if "properties" in schema or "required" in schema:
            raise self._bad("has properties beside what it stands for")
        if "$ref" in schema:
            return self._at(str(schema["$ref"]))
        if not isinstance(options, list) or not options:
            raise self._bad(f"needs a list of schemas, got {shown(options)}")
        self._spend(len(options))
        null = {"type": "null"}
        return null if null in options else options[0]

    def _at(self, reference: str) -> object:
        schema: Any = self._root
        steps = reference.removeprefix("#").strip("/").split("/")
        self._spend(len(steps))
        for step in filter(None, steps):
            name = step.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, dict) else None
        if not isinstance(schema, dict):
            raise self._bad(f"refers to {shown(reference)}, which is not there")
        return schema

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if (
            not isinstance(properties, dict)
            or not isinstance(required, list)
            or not all(isinstance(name, str) for name in required)
        ):
            raise self._bad("needs an object of properties and a list of required names")
        names = required if depth else dict.fromkeys([*properties, *required])
        self._spend(len(names) + sum(map(len, names)))
        return {name: self.value(properties.get(name, True), depth + 1) for name in names}

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        least = self._size(schema, "minItems", 0)
        self._spend(least)
        return [self.value(schema.get("items", True), depth + 1) for _ in range(least)]

    def _string(self, schema: Mapping[str, Any]) -> str:
        known = _FORMATS.get(str(schema.get("format")))
        if known is not None:
            return known
        least = self._size(schema, "minLength", 0)
        self._spend(least)
        text = _TEXT + "." * (least - len(_TEXT))
        return text[: self._size(schema, "maxLength", len(text))]

    def _size(self, schema: Mapping[str, Any], name: str, default: int) -> int:
        size = schema.get(name, default)
        if type(size) is not int or size < 0:
            raise self._bad(f"needs a size as {name!r}, got {shown(size)}")
        return size

    def _numeric(self, schema: Mapping[str, Any], *, is_whole: bool) -> float:
        bounds = {name: schema[name] for name in _BOUNDS if name in schema}
        for name, bound in bounds.items():
            if type(bound) not in (int, float):
                raise self._bad(f"needs a number as {name!r}, got {shown(bound)}")
        tried = [1, *(bound + step for bound in bounds.values() for step in (0, 1, -1))]
        tried.append(sum(bound / len(bounds) for bound in bounds.values()))
        for made in tried:
            if (not is_whole or float(made).is_integer()) and all(
                _BOUNDS[name](made, bound) for name, bound in bounds.items()
            ):
                return int(made) if is_whole else made
        raise self._bad("has bounds within which no number is made up")

    def _bad(self, why: str) -> InvalidRequest:
        return InvalidRequest(self._field, why)
