"""deploy/chart: its values, and the schema that refuses all others, say the same."""

import json
import tomllib

import pytest
import yaml

from tests.chart.rendering import CHART, EXAMPLES, ROOT, golden

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
TYPES = {"string": str, "boolean": bool, "integer": int, "number": int, "array": list}


def resolved(schema):
    """The name of its definition, or "", and what it says."""
    name = schema.get("$ref", "").split("/")[-1]
    return name, SCHEMA["definitions"][name] if name else schema


def properties(schema, path=""):
    """Path and schema of each value that is not made of others."""
    for name, inner in schema["properties"].items():
        name_of_type, inner = resolved(inner)
        if "properties" in inner and name_of_type != "pod":  # Of that, all is Kubernetes' own.
            yield from properties(inner, f"{path}{name}.")
        else:
            yield path + name, inner


def test_each_value_of_the_schema_has_a_default_of_its_type():
    for path, schema in properties(SCHEMA):
        if path == "global":  # Helm's own, where this chart is a part of another.
            continue
        value = VALUES
        for name in path.split("."):
            assert name in value, path
            value = value[name]
        if allowed := schema.get("enum"):
            assert value in allowed, path
            continue
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        assert isinstance(value, tuple(TYPES.get(kind, dict) for kind in kinds)), path


def test_each_default_is_in_the_schema():
    unknown = list(_unknown(VALUES, SCHEMA, ""))
    assert unknown == []


def _unknown(values, schema, path):
    assert schema["additionalProperties"] is False, path
    for name, value in values.items():
        if name not in schema["properties"]:
            yield path + name
            continue
        _, inner = resolved(schema["properties"][name])
        if "properties" in inner:
            yield from _unknown(value, inner, f"{path}{name}.")


def test_each_default_is_read_by_a_template():
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    for path, _ in properties(SCHEMA):
        assert path == "global" or f".{path.split('.')[-1]}" in templates, path


def test_the_chart_is_of_the_version_of_the_project():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_example_has_been_rendered(example):
    assert golden(example).exists()
