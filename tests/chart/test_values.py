"""deploy/chart: its values, and the schema that refuses all others, say the same."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.chart.rendering import CHART, EXAMPLES, ROOT, golden

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
TYPES = {"string": str, "boolean": bool, "integer": int, "number": int, "array": list}


def properties(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and schema of each value that is not made of others."""
    for name, inner in schema["properties"].items():
        inner = SCHEMA["definitions"][inner["$ref"].split("/")[-1]] if "$ref" in inner else inner
        if "properties" in inner:
            yield from properties(inner, f"{path}{name}.")
        else:
            yield path + name, inner


def test_each_value_of_the_schema_has_a_default_of_its_type() -> None:
    for path, schema in properties(SCHEMA):
        if path == "global":  # Helm's own, where this chart is a part of another.
            continue
        value: Any = VALUES
        for name in path.split("."):
            assert name in value, path
            value = value[name]
        allowed = schema.get("enum")
        assert value in allowed if allowed else isinstance(value, TYPES.get(schema["type"], dict))


def test_each_default_is_in_the_schema() -> None:
    unknown = list(_unknown(VALUES, SCHEMA, ""))
    assert unknown == []


def _unknown(values: dict[str, Any], schema: dict[str, Any], path: str) -> Iterator[str]:
    assert schema["additionalProperties"] is False, path
    for name, value in values.items():
        inner = schema["properties"].get(name)
        if inner is None:
            yield path + name
        elif "properties" in inner:
            yield from _unknown(value, inner, f"{path}{name}.")


def test_each_default_is_read_by_a_template() -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    for path, _ in properties(SCHEMA):
        assert path == "global" or f".{path.split('.')[-1]}" in templates, path


def test_the_chart_is_of_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_example_has_been_rendered(example: str) -> None:
    assert golden(example).exists()
