from __future__ import annotations

import re
from typing import Any

import pytest

from app.core.errors import InvalidRequest
from workers.engines.sim.objects import made_up


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string"}, "the quick"),
        ({"type": "string", "maxLength": 3}, "the"),
        ({"type": "string", "format": "date"}, "2026-01-31"),
        ({"type": ["null", "boolean"]}, True),
        ({"enum": ["red", "blue"]}, "red"),
        ({"const": 7}, 7),
        ({"type": "integer", "minimum": 3}, 3),
        ({"type": "integer", "exclusiveMinimum": 3}, 4),
        ({"type": "integer", "maximum": -2, "multipleOf": 5}, -5),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, 0.5),
        ({"type": "array", "items": {"type": "null"}, "minItems": 2}, [None, None]),
        ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, True),
        (
            {"allOf": [{"properties": {"a": True}}, {"required": ["b"]}]},
            {"a": "the quick", "b": "the quick"},
        ),
        ({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"const": 1}}}, {"a": 1}),
    ],
)
def test_a_value_is_made_up_from_a_schema(schema: dict[str, Any], value: object) -> None:
    assert made_up(schema, "tools") == value


def test_a_schema_that_contains_itself_has_an_end() -> None:
    node = {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "type": "object"}
    tree = {"properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}

    assert "None" in str(made_up(node, "tools"))
    assert made_up(tree, "tools") == {"children": [{"children": [{}]}]}


def test_a_string_is_as_long_as_the_schema_asks() -> None:
    assert len(made_up({"type": "string", "minLength": 100}, "tools")) == 100


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "pattern": "^a"}, "'pattern'"),
        ({"type": "colour"}, "has a type 'colour'"),
        ({"$ref": "#/$defs/A"}, "refers to '#/$defs/A'"),
        ({"$ref": "#"}, "refers to itself"),
        ({"type": "array", "minItems": 10**9}, "items"),
        ({"type": "string", "minLength": 10**9}, "characters"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "too large"),
        ({"type": "integer", "minimum": "3"}, "'minimum'"),
        ([], "needs a schema"),
    ],
)
def test_what_cannot_be_made_up_is_refused_by_the_field_it_is_in(
    schema: object, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"tools: .*{re.escape(message)}"):
        made_up(schema, "tools")
