"""Records what a client sends: `python -m tests.clients.record URL PORT FILE`, until Ctrl-C.

Passes requests at PORT on to URL, and writes to FILE the path and body of each that has one, with
long texts cut, and of tools of one form the first two: what is left has every member that the
client sends. tests/data/door/agents.jsonl is of claude-code 2.1.332 (in a terminal, with -p, and
after a search of tools), codex 0.171.0 and opencode 1.18.33, one line for each form of request.
"""

import sys
from pathlib import Path

import httpx
import orjson
from aiohttp import web

TEXT_CHARACTERS = 60
_WHOLE = ("arguments",)
_FEW = ("tools", "properties", "required", "enum")


def shortened(value, name=""):
    """A body, or what is in one under that name."""
    if isinstance(value, dict):
        kept = [*value.items()][:2] if name in _FEW else value.items()
        return {inner: shortened(item, inner) for inner, item in kept}
    if isinstance(value, list):
        return [shortened(item) for item in (_of_each_form(value) if name in _FEW else value)]
    if isinstance(value, str) and len(value) > TEXT_CHARACTERS and name not in _WHOLE:
        return value[:TEXT_CHARACTERS] + "…"
    return value


def _of_each_form(items):
    """The first two of each."""
    kept = []
    for item in items:
        forms = [_form(other) for other in kept]
        if forms.count(_form(item)) < 2:
            kept.append(item)
    return kept


def _form(item):
    return (sorted(item), item.get("type")) if isinstance(item, dict) else type(item)


def recorder(url, file):
    async def pass_on(request):
        sent = await request.read()
        if sent:
            line = {"path": request.path, "body": shortened(orjson.loads(sent))}
            with file.open("ab") as written:
                written.write(orjson.dumps(line) + b"\n")
        own = ("host", "connection", "content-length", "accept-encoding")
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in own]
        target = url + request.raw_path
        async with (
            httpx.AsyncClient(timeout=300) as client,
            client.stream(request.method, target, headers=headers, content=sent) as answer,
        ):
            passed = web.StreamResponse(status=answer.status_code)
            passed.content_type = answer.headers.get("content-type", "text/plain").split(";")[0]
            await passed.prepare(request)
            async for piece in answer.aiter_raw():
                await passed.write(piece)
            return passed

    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", pass_on)
    return app


if __name__ == "__main__":
    _, url, port, file = sys.argv
    web.run_app(recorder(url, Path(file)), host="127.0.0.1", port=int(port))
