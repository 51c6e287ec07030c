"""The front page, at the path that people try first, and the pages that document the paths."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from app.console.page import SAFE
from app.edge.services import Replica

WHAT = "kvroute: a router of LLM requests, each to the engine whose KV cache has its prompt."
LINKS = {
    "console/": "the console: what fails, where, and what to do",
    "docs": "all paths; OpenAI and Anthropic clients take this address, with /v1, as theirs",
}
"""Relative, so that they lead below any prefix."""
DOCS_FILES = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
ROUTER = APIRouter(include_in_schema=False)


@ROUTER.get("/")
async def front_page(request: Request, replica: Replica) -> Response:
    """Three lines and two links: as HTML where a browser asks, else as text."""
    links = [link for link in LINKS if link != "console/" or replica.console is not None]
    if is_html := "text/html" in request.headers.get("accept", ""):
        rows = "".join(f"<p><a href={link}>/{link}</a> {LINKS[link]}" for link in links)
        head = "<!doctype html><html lang=en><meta charset=utf-8><title>kvroute</title>"
        text = f"{head}<meta name=viewport content=width=device-width><p>{WHAT}{rows}"
    else:
        text = "".join([f"{WHAT}\n", *(f"/{link:<9} {LINKS[link]}\n" for link in links)])
    kind = HTMLResponse if is_html else PlainTextResponse
    return kind(text, headers={**SAFE, "vary": "accept"})


@ROUTER.get("/openapi.json")
def openapi(request: Request) -> Response:
    """Every path with its fields and errors. The first time takes a while, in a thread."""
    return JSONResponse(request.app.openapi())


@ROUTER.get("/docs")
async def docs() -> Response:
    """Show /openapi.json as a page."""
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title="kvroute router",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="data:,",
    )


@ROUTER.get("/docs/{name}")
def docs_file(name: str) -> Response:
    """A file of Swagger UI, compressed as it is kept: no page of ours needs another host."""
    if name not in DOCS_FILES:
        raise HTTPException(404, "There is no such file.")
    kept = files("app.edge") / "static" / f"{name}.gz"
    headers = {"content-encoding": "gzip", "cache-control": "max-age=86400"}
    return Response(kept.read_bytes(), media_type=DOCS_FILES[name], headers=headers)
