"""Writes the reference pages from the code: docs/api.md, configuration.md and access-log.md.

python -m tools.reference

The first comes from the router's OpenAPI description and its table of errors, the second from the
settings of each process, the third from the fields of the log.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from app.core.errors import AllWorkersBusy
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import CommonSettings, flag, shown_default
from app.core.settings.planner import PlannerSettings
from app.core.settings.router import CARRIAGE_SETTINGS, PickerSettings, RouterSettings
from app.core.settings.worker import MemberSettings, WorkerSettings
from app.door.told.access_log import FIELDS, LINE_FIELDS
from app.edge.app import create_app
from app.edge.errors import ERRORS, FRAMEWORK_ERRORS
from app.edge.reload import LIVE
from app.http.errors import MAX_RETRY_AFTER_S, RETRIED

DOCS = Path(__file__).parents[1] / "docs"
WRITTEN_BY = "<!-- Written by `python -m tools.reference`: do not edit. -->"
SUCCESS = "200"
JSON = "application/json"


def main() -> None:
    """Write all pages."""
    (DOCS / "api.md").write_text(api())
    (DOCS / "configuration.md").write_text(configuration())
    (DOCS / "access-log.md").write_text(access_log())


def configuration() -> str:
    """Every setting: its flag, its variable, its default and its meaning, for each process."""
    shared = {f.name for f in fields(CommonSettings)}
    router = {f.name for f in fields(RouterSettings)}
    member = {f.name for f in fields(MemberSettings)}
    sections = (
        ("All processes", fields(CommonSettings)),
        ("Routers", [f for f in fields(RouterSettings) if f.name not in shared]),
        ("Pickers", [f for f in fields(PickerSettings) if f.name not in router]),
        (
            "Workers and agents beside engines",
            [f for f in fields(MemberSettings) if f.name not in shared],
        ),
        ("Workers", [f for f in fields(WorkerSettings) if f.name not in member]),
        (
            "Agents beside engines",
            [f for f in fields(EngineAgentSettings) if f.name not in member],
        ),
        ("Planners", [f for f in fields(PlannerSettings) if f.name not in shared]),
    )
    lines = [
        "# Configuration",
        "",
        WRITTEN_BY,
        "",
        "Each part below is a command: `kvroute router`, `picker`, `worker`, `agent` or `planner`. "
        "A picker has a router's settings too, but for "
        f"{', '.join(f'`{name.replace(chr(95), chr(45))}`' for name in CARRIAGE_SETTINGS)}. Every "
        "setting is a flag, an environment variable, and a key of the TOML file that `--config` "
        "(`KVROUTE_CONFIG`) names: `--wait-queue`, `KVROUTE_WAIT_QUEUE`, `wait-queue = 64`; the "
        "variable of `--redis-url` is `REDIS_URL`. The flag goes before "
        "the variable, and that before the file. What is only on or off has a flag for each, "
        "`--migrate` and `--no-migrate`, and `true` or `false` in a variable or a file. A bad "
        "value or name in a file stops the start with a message that names it. `kvroute up` takes "
        "the settings of routers, workers and the planner.",
        "",
        "`--help` lists what is often set, `--help-all` everything below.",
        "",
        "A router reads its file again when it changes and on SIGHUP. Keys, the log level and "
        f"limits then count at once ({_live()}), all else from the next start on.",
        "",
        "The variables of the balancer are in [kubernetes.md](kubernetes.md#the-balancer).",
    ]
    for title, settings in sections:
        lines += ["", f"## {title}", ""]
        lines += _table(("flag", "default", "meaning"), map(_setting, settings))
    return _page(lines)


def _live() -> str:

    return ", ".join(f"`{name.replace('_', '-')}`" for name in sorted(LIVE))


def access_log() -> str:
    """Every field of a line of the access log."""
    helps = {name: field.help for name, field in FIELDS.items()} | LINE_FIELDS
    lines = [
        "# The access log",
        "",
        WRITTEN_BY,
        "",
        "With `--access-log`, a router writes a line of JSON to standard output for each request "
        "that has ended at a path of the [front door](front-door.md), refused ones too. It has all "
        "of these fields, and never a prompt or an answer. What is not known is null.",
        "",
        *_table(("field", "meaning"), ((f"`{name}`", text) for name, text in helps.items())),
    ]
    return _page(lines)


def _setting(f: Field[Any]) -> tuple[str, ...]:

    default = shown_default(f)
    shown = f"`{default}`" if default else ""
    return f"`{flag(f)}`", shown, f.metadata["help"]


def api() -> str:
    """Every endpoint of a router with its fields, the objects in answers, and all errors."""
    description = create_app(RouterSettings()).openapi()
    models: Mapping[str, Any] = description["components"]["schemas"]
    sections: dict[tuple[str, ...], list[str]] = {}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            if not path.startswith("/console/"):
                told = tuple(_operation(operation, models))
                sections.setdefault(told, []).append(f"{method.upper()} {path}")
    lines = [
        "# A router's API",
        "",
        WRITTEN_BY,
        "",
        "The same in OpenAPI is at `GET /openapi.json`, with the paths of the console's page. "
        "[client.md](client.md#of-v1route) says in what order a client calls what, and "
        "[workers.md](workers.md) describes the API of workers.",
    ]
    for told, (name, *others) in sections.items():
        lines += ["", f"## {name}", ""]
        if others:
            lines += [f"Likewise {', '.join(f'`{other}`' for other in others)}.", ""]
        lines += told
    lines += ["", "## Objects in answers"]
    roots = {*_answers(description), "ErrorBody", "ErrorDetail"}
    for name in _named(lines, models.keys() - roots, models):
        lines += ["", f"### {name}", "", *_described(models[name])]
    lines += [
        "",
        "## Errors",
        "",
        'Every error is `{"error": {"code", "message", "field"}}`. `field` is null unless one '
        "field of the request is to blame. `Retry-After` is in seconds. At the paths of OpenAI's "
        "and Anthropic's clients, errors have the form that those expect, and 400 stands for 422.",
        "",
        *_table(("code", "status", "meaning", "Retry-After"), _errors()),
    ]
    return _page(lines)


def _named(
    lines: Iterable[str], names: Collection[str], models: Mapping[str, Any]
) -> Sequence[str]:
    """The models that the lines name, and those that these name."""
    text, named = "\n".join(lines), set[str]()
    while new := {n for n in names if n not in named and re.search(rf"\b{n}\b", text)}:
        named |= new
        text = "\n".join(line for name in new for line in _described(models[name]))
    return sorted(named)


def _operation(operation: Mapping[str, Any], models: Mapping[str, Any]) -> Iterator[str]:
    yield " ".join(operation["description"].split())
    content: Mapping[str, Any] = operation.get("requestBody", {}).get("content", {})
    parameters = operation.get("parameters", [])
    if JSON in content:
        body = content[JSON]["schema"]
        yield from ("", "Body, as JSON:", "", *_described(body))
        if raw := content.keys() - {JSON}:
            [kind] = raw
            yield from ("", f"Body, as `{kind}`: {content[kind]['schema']['description']}.")
    elif parameters:
        rows = (
            (f"`{p['name']}`", p["in"], _type(p["schema"]), _meaning(p["schema"]))
            for p in parameters
        )
        yield from ("", *_table(("parameter", "in", "type", "meaning"), rows))
    answer = operation["responses"][SUCCESS].get("content", {}).get(JSON, {}).get("schema", {})
    if "$ref" in answer:
        yield from ("", "Answer:", "", *_described(models[_name(answer)]))
    statuses = [status for status in operation["responses"] if status != SUCCESS]
    if statuses:
        yield from ("", f"Other statuses: {', '.join(statuses)}.")


def _answers(description: Mapping[str, Any]) -> Iterator[str]:
    """Names of the models that are whole answers."""
    for operations in description["paths"].values():
        for operation in operations.values():
            content = operation["responses"][SUCCESS].get("content", {})
            schema = content.get(JSON, {}).get("schema", {})
            if "$ref" in schema:
                yield _name(schema)


def _described(model: Mapping[str, Any]) -> Iterator[str]:
    if model.get("description"):
        yield from (" ".join(model["description"].split()), "")
    rows = (
        (f"`{name}`", _type(schema), _meaning(schema))
        for name, schema in model["properties"].items()
    )
    yield from _table(("field", "type", "meaning"), rows)


def _meaning(schema: Mapping[str, Any]) -> str:
    parts = [schema["description"]] if "description" in schema else []
    if schema.get("default") is not None:
        default = schema["default"]
        shown = str(default).lower() if isinstance(default, bool) else default
        parts.append(f"default: `{shown}`")
    return "; ".join(parts)


def _type(schema: Mapping[str, Any]) -> str:
    """A type in words; null is left out, as any optional field may be null or missing."""
    if "$ref" in schema:
        return _name(schema)
    options = [_type(option) for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    if options:
        return " or ".join(options)
    if "type" not in schema:
        return "any"
    if schema["type"] == "array":
        return f"list of {_type(schema['items'])}"
    if schema["type"] == "object":
        values = schema.get("additionalProperties")
        return f"object of {_type(values)}" if isinstance(values, dict) else "object"
    pattern: str = schema.get("pattern", "")
    choices = pattern.removeprefix("^(").removesuffix(")$")
    if choices != pattern:
        return ", ".join(f"`{choice}`" for choice in choices.split("|"))
    return f"{schema['type']} `{pattern}`" if pattern else str(schema["type"])


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"].rsplit("/", 1)[1])


def _errors() -> Iterator[tuple[str, ...]]:
    rows = {(status, code): (meaning, "") for code, status, meaning in FRAMEWORK_ERRORS}
    for kind, (status, code, _) in ERRORS.items():
        meaning = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
        retry = "1" if status in RETRIED else ""
        if kind is AllWorkersBusy:
            retry = f"1 to {MAX_RETRY_AFTER_S}"
        rows.setdefault((status, code), (meaning, retry))
    for (status, code), (meaning, retry) in sorted(rows.items()):
        yield f"`{code}`", str(status), meaning, retry


def _table(head: tuple[str, ...], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield _row(head)
    yield "|" + "---|" * len(head)
    yield from map(_row, rows)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _page(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
