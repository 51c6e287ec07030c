"""Objects made up from a JSON Schema: what a simulated model writes where it is told a form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import orjson

from app.core.errors import InvalidRequest, shown
from workers.engines.sim.text import WORDS

MAX_DEPTH = 24
OPTIONAL_DEPTH = 3
"""Deeper, only what is required is made up, as schemas may contain themselves."""
MAX_VALUES = 2_000
MAX_WORK = 250_000
"""Members of schemas that are looked at or copied, and characters that are made up, all in all:
some 50 ms. A schema of 3 kB can stand for one of any size, whether much is made up for it or not.
"""
A_STEP = 25
"""What a schema that stands for another costs, beside its members."""
_FORMATS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "duration": "P1D",
    "email": "fox@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/",
    "uuid": "123e4567-e89b-42d3-a456-426614174000",
}
_UNKNOWN = ("pattern", "not", "if", "dependentSchemas", "patternProperties", "contains")
"""What nothing is made up for."""


def made_up(schema: object, field: str) -> Any:
    """A value that the schema allows. Raises InvalidRequest, which names `field`, if it is none or
    nothing can be made up for it."""
    try:
        return _Maker(schema, field).value(schema, 0)
    except OverflowError as error:
        raise InvalidRequest(field, f"has bounds that no number is within: {error}") from None


class _Maker:
    def __init__(self, root: object, field: str) -> None:
        self._root = root
        self._field = field
        self._num_values = 0
        self._work = 0

    def _spend(self, work: int) -> None:
        """Before it is done."""
        self._work += work
        if self._work > MAX_WORK:
            raise self._bad("takes too long to be made sense of")

    def value(self, schema: object, depth: int) -> Any:
        schema = self._resolved(schema, depth)
        self._num_values += 1
        if depth > MAX_DEPTH or self._num_values > MAX_VALUES:
            raise self._bad("needs too large an object")
        for name in _UNKNOWN:
            if name in schema:
                raise self._bad(f"nothing is made up for {name!r} in a schema")
        if "const" in schema:
            return self._copied(schema["const"])
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return self._copied(schema["enum"][0])
        kinds = schema.get("type", "object" if "properties" in schema else "string")
        if isinstance(kinds, list):
            kinds = next((kind for kind in kinds if kind != "null"), "null")
        make = _MAKERS.get(kinds) if isinstance(kinds, str) else None
        if make is None:
            raise self._bad(f"has a type {shown(kinds)}")
        return make(self, schema, depth)

    def _copied(self, value: object) -> object:
        try:
            self._spend(len(orjson.dumps(value)))
        except TypeError as error:  # what can be read can be written, but for its depth
            raise self._bad(f"is nested too deeply: {error}") from None
        return value

    def _resolved(self, schema: object, depth: int, within: int = 0) -> Mapping[str, Any]:
        """With references, unions and intersections replaced by what they stand for. within: so
        many of those."""
        for _ in range(MAX_DEPTH - within):
            if schema is True:
                schema = {}
            if not isinstance(schema, dict):
                raise self._bad(f"needs a schema, got {shown(schema)}")
            self._spend(A_STEP + len(schema))
            rest = {n: v for n, v in schema.items() if n not in ("$ref", "allOf", "anyOf", "oneOf")}
            if "$ref" in schema:
                schema = {**self._at(schema["$ref"]), **rest}
            elif schema.get("allOf"):
                listed = self._listed(schema["allOf"])
                parts = [self._resolved(part, depth, within + 1) for part in listed]
                schema = self._merged([*parts, rest])
            elif options := schema.get("anyOf") or schema.get("oneOf"):
                option = self._resolved(self._option(options, depth), depth, within + 1)
                schema = self._merged([option, rest])
            else:
                return schema
        raise self._bad("refers to itself, or to too much")

    def _merged(self, parts: list[Mapping[str, Any]]) -> dict[str, Any]:
        """One schema that asks for what all of them do."""
        merged: dict[str, Any] = {}
        properties: dict[str, Any] = {}
        required: list[Any] = []
        for part in parts:
            self._spend(A_STEP + len(part))
            merged |= part
            if isinstance(own := part.get("properties"), dict):
                self._spend(len(own))
                properties |= own
            if isinstance(needed := part.get("required"), list):
                self._spend(len(needed))
                required += needed
        merged |= {"properties": properties} if properties else {}
        return merged | ({"required": required} if required else {})

    def _option(self, options: object, depth: int) -> object:
        listed = self._listed(options)
        self._spend(len(listed))
        nulls = [option for option in listed if option == {"type": "null"}]
        others = [option for option in listed if option != {"type": "null"}]
        return nulls[0] if nulls and (depth > OPTIONAL_DEPTH or not others) else others[0]

    def _listed(self, value: object) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self._bad(f"needs a list of schemas, got {shown(value)}")
        return value

    def _at(self, reference: object) -> Mapping[str, Any]:
        schema: Any = self._root
        steps = str(reference).removeprefix("#").strip("/").split("/")
        self._spend(len(steps))
        for step in steps:
            name = step.replace("~1", "/").replace("~0", "~")
            schema = schema if not step else schema.get(name) if isinstance(schema, dict) else None
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
        names = dict.fromkeys([*(properties if depth <= OPTIONAL_DEPTH else ()), *required])
        self._spend(len(required) + sum(map(len, names)))
        return {name: self.value(properties.get(name, {}), depth + 1) for name in names}

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        prefix = schema.get("prefixItems") or []
        if not isinstance(prefix, list):
            raise self._bad(f"needs a list as 'prefixItems', got {shown(prefix)}")
        least = self._number(schema, "minItems", 0 if depth > OPTIONAL_DEPTH else 1)
        least = min(least, self._number(schema, "maxItems", least))
        if least > MAX_VALUES:
            raise self._bad(f"needs {least} items")
        items = [self.value(each, depth + 1) for each in prefix]
        rest = schema.get("items", {})
        return items + [self.value(rest, depth + 1) for _ in range(len(items), int(least))]

    def _string(self, schema: Mapping[str, Any], _: int) -> str:
        known = _FORMATS.get(str(schema.get("format")))
        if known is not None:
            self._spend(len(known))
            return known
        least = int(self._number(schema, "minLength", 0))
        most = int(self._number(schema, "maxLength", max(least, 32)))
        if least > MAX_VALUES:
            raise self._bad(f"needs {least} characters")
        text = " ".join(WORDS[:2])
        while len(text) < least:
            text += " " + text
        self._spend(len(text))
        return text[:most]

    def _numeric(self, schema: Mapping[str, Any], _: int) -> float:
        low, above = self._bound(schema, "minimum", "exclusiveMinimum", max)
        high, below = self._bound(schema, "maximum", "exclusiveMaximum", min)
        is_whole = "integer" in schema["type"]
        step = self._number(schema, "multipleOf", 1 if is_whole else 0)
        if step:
            multiple = (high or 0) // step if low is None else -(-low // step)
            if low is not None:
                multiple += above and multiple * step == low
            else:
                multiple -= below and multiple * step == high
            made = multiple * step
            if not isfinite(made):
                raise self._bad(f"has no multiple of {step} within its bounds")
            return int(made) if is_whole else made
        if low is not None and high is not None:
            return (low + high) / 2
        return low + 0.5 if low is not None else (high or 0) - 0.5

    def _bound(
        self, schema: Mapping[str, Any], name: str, beyond: str, strictest: Callable[..., float]
    ) -> tuple[float | None, bool]:
        """The bound of a number, and whether the number must be beyond it."""
        given = [self._number(schema, each, 0) for each in (name, beyond) if each in schema]
        if not given:
            return None, False
        bound = strictest(given)
        return bound, beyond in schema and schema[beyond] == bound

    def _number(self, schema: Mapping[str, Any], name: str, default: float) -> float:
        value = schema.get(name, default)
        if type(value) not in (int, float):
            raise self._bad(f"needs a number as {name!r}, got {shown(value)}")
        return float(value) if isinstance(value, float) else int(value)

    def _bad(self, why: str) -> InvalidRequest:
        return InvalidRequest(self._field, why)


_MAKERS = {
    "object": _Maker._object,
    "array": _Maker._array,
    "string": _Maker._string,
    "integer": _Maker._numeric,
    "number": _Maker._numeric,
    "boolean": lambda *_: True,
    "null": lambda *_: None,
}
