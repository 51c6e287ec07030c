"""The files of the console's page, as they lie in app/console/static."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.exceptions import HTTPException

from app.edge.client import Client

TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
SAFE = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class File:
    body: bytes
    compressed: bytes
    kind: bytes
    etag: bytes


async def page(client: Client) -> None:
    """A file of the page. Its own links are relative, so that it works below any prefix."""
    if client.replica.console is None:
        raise HTTPException(404, "The console is off: --console.")
    file = static_files().get(client.path_params.get("file", INDEX))
    if file is None:
        raise HTTPException(404, "There is no such file.")
    headers = [*SAFE, (b"cache-control", b"no-cache"), (b"etag", file.etag)]
    headers += [(b"content-type", file.kind), (b"vary", b"accept-encoding")]
    if client.raw_headers.get(b"if-none-match") == file.etag:
        await client.start(304, headers)
        await client.send(b"", last=True)
        return
    takes_gzip = b"gzip" in client.raw_headers.get(b"accept-encoding", b"")
    if takes_gzip:
        headers.append((b"content-encoding", b"gzip"))
    await client.answer_whole(file.compressed if takes_gzip else file.body, 200, *headers)


async def redirect(client: Client) -> None:
    """To the path with a slash, from which the page's links are relative."""
    await client.answer_whole(b"", 307, (b"location", b"console/"))


@cache
def static_files() -> Mapping[str, File]:
    """By their paths below app/console/static. Other kinds than TYPES are not served."""
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
            etag = b'"%s"' % hashlib.blake2b(body, digest_size=12).hexdigest().encode()
            files.append((path + entry.name, File(body, gzip.compress(body), kind, etag)))
    return files
