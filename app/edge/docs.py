"""All paths in OpenAPI, and on a plain page. FastAPI's own loads scripts from another host, which
many networks forbid."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

import orjson

from app.edge.client import Client
from app.edge.routes import Route
from app.http.client import JSON

_HTML = (b"content-type", b"text/html; charset=utf-8")


async def openapi(client: Client) -> None:
    """Every path with its fields and errors."""
    await client.answer_whole(orjson.dumps(await _description(client)), 200, JSON)


async def docs(client: Client) -> None:
    """Every path with the first sentence of its description, and where the rest is."""
    page = "\n".join(_lines(await _description(client)))
    await client.answer_whole(page.encode(), 200, _HTML)


async def _description(client: Client) -> dict[str, Any]:
    return await asyncio.to_thread(lambda: client.app.description)


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


ROUTES = [
    Route("GET", "/docs", docs, is_described=False),
    Route("GET", "/openapi.json", openapi, is_described=False),
]
