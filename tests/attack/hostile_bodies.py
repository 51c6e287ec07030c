"""Bodies that are made to be slow to read, by a router's own paths and at its front door."""

from app.core.settings.router import RouterSettings

BLOCK_SIZE = 16
MAX_TOKENS = RouterSettings().max_prompt_tokens
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

REFUSED = {
    "empty lists": "mm_hashes: over",
    "lists of one": "mm_hashes: over",
    "nested arrays": "besides the items of",
    "nested objects": "besides the items of",
    "objects": "besides the items of",
    "hex": "local_hashes: over",
    "negative": "local_hashes: over",
    "big integers": "token_ids.0: ",
    "digits": "token_ids.0: nothing ends it",
    "slow numbers": "token_ids.0: ",
    "slow hashes": "local_hashes.0: ",
    "unknown fields": "besides the items of",
    "exclude": "exclude: over",
    "one bad token": "token_ids.",
    "twice": "token_ids: comes twice",
    "blanks": "besides the items of",
    "long text": "besides the items of",
    "open": "has no end",
    "open lists": "has no end",
}


def _array(name, item, size, count=None):
    """A field with as many of the item as fit into `size` bytes, at most `count`."""
    fitting = (size - 100) // (len(item) + 1)
    items = b",".join([item] * min(fitting, count or fitting))
    return b'"%b":[%b]' % (name.encode(), items)


def hostile_bodies(size):
    """Names and bodies of up to `size` bytes."""
    slow = b"1.7976931348623157081e-300"
    blocks = min(MAX_TOKENS, size // 4) // BLOCK_SIZE
    few, hashes = size // 19, min(size // 19, MAX_TOKENS // BLOCK_SIZE)
    fields = {
        "empty lists": _array("mm_hashes", b"[]", size),
        "lists of one": _array("mm_hashes", b"[1]", size),
        "nested arrays": b'"token_ids":' + b"[" * (size // 2 - 50) + b"]" * (size // 2 - 50),
        "nested objects": b'"a":' + b'{"a":' * (size // 6 - 20) + b"0" + b"}" * (size // 6 - 20),
        "objects": _array("a", b"{}", size),
        "hex": _array("local_hashes", b'"0123456789abcdef"', size),
        "negative": _array("local_hashes", b"-1", size),
        "big integers": _array("token_ids", b"1" * 4000, size),
        "digits": _array("token_ids", b"1" * (size - 200), size),
        "slow numbers": _array("token_ids", slow, size, MAX_TOKENS),
        "slow hashes": _array("local_hashes", slow, size, MAX_TOKENS // BLOCK_SIZE),
        "unknown fields": b",".join(b'"a%d":0' % n for n in range(size // 12)),
        "exclude": _array("exclude", b'""', size),
        "one bad token": _array("token_ids", b"1", size, min(few, MAX_TOKENS - 1))[:-1] + b",-1]",
        "twice": _array("token_ids", b"1", size // 2) + b"," + _array("token_ids", b"1", size // 2),
        "blanks": b" " * (size - 9),
        "long text": b'"lora_name":"' + b"\\u0041" * (size // 6 - 9) + b'"',
        "open": _array("token_ids", b"1", size)[:-1],
        "open lists": _array("mm_hashes", b"[ ]", size)[:-1],
        "tokens": _array("token_ids", b"123456", size, MAX_TOKENS),
        "tokens with images": _array("token_ids", b"1", size, blocks * BLOCK_SIZE)
        + b","
        + _array("mm_hashes", b"[1]", size, blocks),
        "hex hashes": _array("local_hashes", b'"0123456789abcdef"', size, hashes)
        + b',"num_tokens":%d' % (hashes * BLOCK_SIZE),
        "negative hashes": _array("local_hashes", b"-1", size, hashes)
        + b',"num_tokens":%d' % (hashes * BLOCK_SIZE),
    }
    for name, text in fields.items():
        yield name, b"{%b}" % text


def hostile_door_bodies(size):
    """Names, paths and bodies of about `size` bytes."""

    def member(name, item, begin=b"[", end=b"]"):
        items = b",".join([item] * (size // (len(item) + 1)))
        return b'"%b":%b%b%b' % (name.encode(), begin, items, end)

    def text(name, part):
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
