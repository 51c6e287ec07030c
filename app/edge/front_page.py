"""What this is, at the path that people try first."""

from __future__ import annotations

from app.console.page import SAFE
from app.edge.client import Client
from app.edge.routes import Route

WHAT = "kvroute: a router of LLM requests, each to the engine whose KV cache has its prompt."
LINKS = {
    "console/": "the console: what fails, where, and what to do",
    "docs": "all paths; OpenAI and Anthropic clients take this address, with /v1, as theirs",
}
"""Relative, so that they lead below any prefix."""
_TEXT = (b"content-type", b"text/plain; charset=utf-8")
_HTML = (b"content-type", b"text/html; charset=utf-8")


async def front_page(client: Client) -> None:
    """Three lines and two links: as HTML where a browser asks, else as text."""
    links = [link for link in LINKS if link != "console/" or client.replica.console is not None]
    if b"text/html" in client.raw_headers.get(b"accept", b""):
        rows = "".join(f"<p><a href={link}>/{link}</a> {LINKS[link]}" for link in links)
        head = "<!doctype html><html lang=en><meta charset=utf-8><title>kvroute</title>"
        text = f"{head}<meta name=viewport content=width=device-width><p>{WHAT}{rows}"
        kind = _HTML
    else:
        text = "".join([f"{WHAT}\n", *(f"/{link:<9} {LINKS[link]}\n" for link in links)])
        kind = _TEXT
    await client.answer_whole(text.encode(), 200, kind, *SAFE, (b"vary", b"accept"))


ROUTES = [Route("GET", "/", front_page, is_described=False)]
