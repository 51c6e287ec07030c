"""A plain page of all paths. FastAPI's own loads scripts from another host, which many networks
forbid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from app.edge.client import Client
from app.edge.routes import Route

_HTML = (b"content-type", b"text/html; charset=utf-8")


async def docs(client: Client) -> None:
    """Every path with the first sentence of its description, and where the rest is."""
    page = "\n".join(_lines(client.app.openapi()))
    await client.answer_whole(page.encode(), 200, _HTML)


def _lines(description: Mapping[str, Any]) -> Iterator[str]:
    version = description["info"]["version"]
    yield "<!doctype html><html lang=en><meta charset=utf-8><title>kvroute router</title>"
    yield f"<h1>kvroute router</h1><p>API version {escape(version)}. All fields and errors are in"
    yield "<a href=openapi.json>openapi.json</a> (OpenAPI), and in docs/api.md of kvroute.</p>"
    yield "<table>"
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            what = " ".join(operation["description"].split())
            yield f"<tr><td>{method.upper()}<td><code>{escape(path)}</code><td>{escape(what)}"
    yield "</table>"


ROUTES = [Route("GET", "/docs", docs, include_in_schema=False)]
