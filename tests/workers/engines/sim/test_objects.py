from __future__ import annotations

import re
from typing import Any

import pytest

from app.core.errors import InvalidRequest
from workers.engines.sim import objects
from workers.engines.sim.objects import made_up

A_AND_C = {"a": None, "c": "the quick"}
ONE = {"A": {"const": 1}}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string"}, "the quick"),
        ({"type": "string", "maxLength": 3}, "the"),
        ({"type": "string", "format": "date"}, "2026-01-31"),
        ({"type": "boolean"}, True),
        ({"type": ["string", "null"]}, None),
        ({"type": ["string", "integer"]}, "the quick"),
        ({"enum": ["red", "blue"]}, "red"),
        ({"const": 7}, 7),
        ({"type": "integer", "minimum": 3}, 3),
        ({"type": "integer", "exclusiveMinimum": 3}, 4),
        ({"type": "integer", "maximum": -2}, -2),
        ({"type": "integer", "exclusiveMaximum": 1.5, "minimum": 0.5}, 1),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, 0.5),
        ({"type": "array", "items": {"type": "null"}, "minItems": 2}, [None, None]),
        ({"oneOf": [{"type": "boolean"}, {"type": "string"}]}, True),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}], "title": "A"}, None),
        ({"properties": {"a": {"type": "null"}}, "required": ["c"]}, A_AND_C),
        ({"type": "array", "minItems": 1, "items": {"properties": {"a": {}}}}, [{}]),
        ({"type": "array", "items": {"$ref": "#/$defs/A"}, "minItems": 1, "$defs": ONE}, [1]),
    ],
)
def test_a_value_is_made_up_from_a_schema(schema: dict[str, Any], value: object) -> None:
    assert made_up(schema, "tools") == value


def test_a_schema_that_contains_itself_has_an_end() -> None:
    node = {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "type": "object"}
    tree = {"properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}

    assert made_up(node, "tools") == {"next": None}
    assert made_up(tree, "tools") == {"children": []}
    assert made_up({"properties": {"inner": {"$ref": "#"}}}, "tools") == {"inner": {}}


def test_a_string_is_as_long_as_the_schema_asks() -> None:
    assert len(made_up({"type": "string", "minLength": 100}, "tools")) == 100


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "pattern": "^a"}, "'pattern'"),
        ({"type": "colour"}, "has a type 'colour'"),
        ({"$ref": "#/$defs/A"}, "refers to '#/$defs/A'"),
        ({"$ref": "#"}, "refers to itself"),
        ({"allOf": [{"type": "string"}]}, "'allOf'"),
        ({"anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, "beside"),
        ({"type": "array", "minItems": 10**9}, "too long"),
        ({"type": "string", "minLength": 10**9}, "too long"),
        ({"type": "string", "maxLength": -1}, "'maxLength'"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "refers to itself"),
        ({"type": "integer", "minimum": "3"}, "'minimum'"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "bounds"),
        ([], "needs a schema"),
    ],
)
def test_what_cannot_be_made_up_is_refused_by_the_field_it_is_in(
    schema: object, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"tools: .*{re.escape(message)}"):
        made_up(schema, "tools")


MANY = 50_000
LONG = "x" * 100_000


def nested(name: str, times: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(times):
        schema = {name: [schema]}
    return schema


def multiplying(times: int) -> dict[str, Any]:
    """Each definition has the next one ten times: what is at the end is there 10^times times."""
    steps = {
        f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}, "minItems": 10}
        for n in range(times)
    }
    return {"$ref": "#/$defs/d0", "$defs": steps | {f"d{times}": {"type": "null"}}}


@pytest.mark.parametrize(
    "schema",
    [
        multiplying(8),
        nested("anyOf", 900),
        {"items": {"const": LONG}, "type": "array", "minItems": 2000},
        {"items": {"enum": [LONG]}, "type": "array", "minItems": 2000},
        {"items": {"type": "object", "required": [LONG]}, "type": "array", "minItems": 2000},
        {"items": {"minLength": 2000}, "type": "array", "minItems": 1999},
        {"items": {"$ref": "#/" + "a/" * MANY}, "type": "array", "minItems": 2000, "a": {}},
        {"type": "array", "items": {"$ref": "#/d"}, "minItems": 2000, "d": {"anyOf": [{}] * MANY}},
        {"required": [f"r{n}" for n in range(MANY)], "type": "object"},
        {"const": nested("a", 900)},
    ],
)
def test_no_schema_takes_more_work_than_it_may(
    schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: list[int] = []
    spend = objects._Maker._spend

    def counted(maker: Any, work: int) -> None:
        spend(maker, work)
        spent.append(maker._work)

    monkeypatch.setattr(objects._Maker, "_spend", counted)
    with pytest.raises(InvalidRequest):
        made_up(schema, "tools")
    assert len(spent) < 20_000, "whatever is done costs something"
