"""Bodies that are made to be slow to read at the front door."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from app.core.errors import InvalidRequest

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def hostile_door_bodies(size: int) -> Iterator[tuple[str, str, bytes]]:
    """Names, paths and bodies of about `size` bytes."""

    def member(name: str, item: bytes, begin: bytes = b"[", end: bytes = b"]") -> bytes:
        items = b",".join([item] * (size // (len(item) + 1)))
        return b'"%b":%b%b%b' % (name.encode(), begin, items, end)

    def text(name: str, part: bytes) -> bytes:
        return b'"%b":"%b"' % (name.encode(), part * (size // len(part)))

    small = size // 6 // 100
    kinds = {
        "messages of lists": (CHAT, member("messages", b"[]")),
        "messages of nothing": (CHAT, member("messages", b"{}")),
        "as many messages as are read": (
            CHAT,
            b'"messages":[%b]' % b",".join([b'{"role":"user","content":""}'] * min(30_000, small)),
        ),
        "tools": (CHAT, member("tools", b"{}")),
        "strings": (COMPLETION, member("prompt", b'""')),
        "pairs of ids": (COMPLETION, member("prompt", b"[0,0]")),
        "ids in an array": (COMPLETION, member("prompt", b"0", b"[[", b"]]")),
        "large ids": (COMPLETION, member("prompt", b"18446744073709551616")),
        "floats": (COMPLETION, member("prompt", b"1.7976931348623157081e-300")),
        "unknown values": (CHAT, member("unknown", b"{}")),
        "text": (COMPLETION, text("prompt", b"a")),
        "escaped text": (COMPLETION, text("prompt", b"\\u0041")),
        "text of quotes": (COMPLETION, text("prompt", b'\\",')),
        "text of backslashes": (COMPLETION, text("prompt", b"\\\\")),
        "text of two bytes a character": (COMPLETION, text("prompt", "\u00e9".encode())),
        "members": (CHAT, b",".join(b'"a%d":0' % n for n in range(size // 12))),
        "nested": (CHAT, b'"messages":' + b"[" * (size // 2) + b"]" * (size // 2)),
        "blanks": (CHAT, b'"messages":' + b" " * size + b"[]"),
    }
    for name, (path, body) in kinds.items():
        yield name, path, b"{%b}" % body


async def read_at_the_door(path: str, raw: bytes) -> bool:
    """What a front door does with a body before it tokenizes. Returns whether it was accepted."""
    # The measuring processes of other benchmarks must not load the servers' HTTP code.
    from app.door import members
    from app.http.json_body import JsonBody
    from app.tokens.messages import size

    with suppress(InvalidRequest):
        body = await JsonBody.read(raw)
        members.check(body)
        size(body.fields)
        body.fields.get("prompt")
        body.changed({"stream_options": {"include_usage": True}})
        return True
    return False
