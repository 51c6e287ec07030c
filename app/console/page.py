"""Files of the console's page, from app/console/static."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, HTTPException, Request, Response

from app.edge.services import Replica

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
SAFE = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
INDEX = "index.html"
ROUTER = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class File:
    body: bytes
    compressed: bytes
    kind: str
    etag: str


@ROUTER.get("/console/")
@ROUTER.get("/console/static/{file:path}")
async def page(request: Request, replica: Replica, file: str = INDEX) -> Response:
    """Send a file of the page. Its links are relative, so that it works below any prefix."""
    if replica.console is None:
        raise HTTPException(404, "The console is off: --console.")
    found = static_files().get(file)
    if found is None:
        raise HTTPException(404, "There is no such file.")
    headers = {**SAFE, "cache-control": "no-cache", "etag": found.etag, "content-type": found.kind}
    headers["vary"] = "accept-encoding"
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    takes_gzip = "gzip" in request.headers.get("accept-encoding", "")
    if takes_gzip:
        headers["content-encoding"] = "gzip"
    return Response(found.compressed if takes_gzip else found.body, headers=headers)


@ROUTER.get("/console")
async def redirect() -> Response:
    """Redirect to the path with a slash, from which the page's links are relative."""
    return Response(status_code=307, headers={"location": "console/"})


@cache
def static_files() -> Mapping[str, File]:
    """Returns the files of TYPES by their paths below app/console/static."""
    return dict(_below(files("app.console") / "static", ""))


def _below(folder: Traversable, path: str) -> list[tuple[str, File]]:
    files = []
    for entry in folder.iterdir():
        if entry.is_dir():
            files += _below(entry, f"{path}{entry.name}/")
            continue
        kind = TYPES.get(f".{entry.name.rpartition('.')[2]}")
        if kind is not None:
            body = entry.read_bytes()
            etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
            files.append((path + entry.name, File(body, gzip.compress(body), kind, etag)))
    return files
