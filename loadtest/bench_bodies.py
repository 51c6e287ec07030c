"""How long hostile bodies keep a replica's other callers waiting, and what they cost it.

    python -m loadtest.bench_bodies

Each body is as large as a replica takes, and made to be slow to read. A ticker on the same event
loop measures the most CPU time between two of its turns while the body is read and its blocks are
hashed; what else runs on the machine does not count. `times` compares all the CPU with that of the
longest prompt, as raw tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from app.core.errors import InvalidRequest
from app.core.settings.router import RouterSettings
from app.http.server import collect_seldom, run
from app.options import POSITIVE
from loadtest.command import Command, json_option, save, table
from loadtest.door_bodies import hostile_door_bodies, read_at_the_door

BLOCK_SIZE = 16
MAX_TOKENS = RouterSettings().max_prompt_tokens
MAX_BYTES = RouterSettings().max_body_bytes
DOOR_BYTES = RouterSettings().max_request_bytes
LIMIT_MS = 50.0
"""No body may hold the loop for longer."""

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
"""What the refusal of each body that is refused contains."""


def _array(name: str, item: bytes, size: int, count: int | None = None) -> bytes:
    """A field with as many of the item as fit into `size` bytes, at most `count`."""
    fitting = (size - 100) // (len(item) + 1)
    items = b",".join([item] * min(fitting, count or fitting))
    return b'"%b":[%b]' % (name.encode(), items)


def hostile_bodies(size: int) -> Iterator[tuple[str, bytes]]:
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


async def read_and_hash(raw: bytes) -> bool:
    """What a replica does with a body before it decides. Returns whether it was accepted."""
    # The measuring processes of other benchmarks must not load the servers' HTTP code.
    from pydantic import ValidationError

    from app.edge import ask
    from app.edge.large import BodyReader
    from app.edge.schemas import RouteBody

    bodies = BodyReader(MAX_TOKENS)
    with suppress(InvalidRequest, ValidationError):
        body, tokens = await bodies.read(RouteBody, raw, BLOCK_SIZE, "")
        await ask.of_body(body, tokens, MAX_TOKENS).chain(BLOCK_SIZE)
        return True
    return False


async def measure(reading: Awaitable[bool]) -> tuple[float, float, bool]:
    """Longest hold of the loop and CPU, both in ms; and whether the body was accepted."""
    longest = 0.0
    seen = time.thread_time()

    async def tick() -> None:
        nonlocal longest, seen
        while True:
            now = time.thread_time()
            longest, seen = max(longest, now - seen), now
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    begin = time.process_time()
    accepted = await reading
    cpu_s = time.process_time() - begin
    await asyncio.sleep(0)
    ticking.cancel()
    return longest * 1000, cpu_s * 1000, accepted


async def longest_prompt() -> float:
    """CPU of the longest prompt as raw tokens, in ms."""
    from app.edge import ask
    from app.edge.schemas import RouteOptions

    raw = bytes(4 * MAX_TOKENS)
    begin = time.process_time()
    await ask.of_tokens(RouteOptions(), raw, MAX_TOKENS).chain(BLOCK_SIZE)
    return (time.process_time() - begin) * 1000


async def figures(size: int, door_size: int, repeat: int) -> dict[str, dict[str, float | str]]:
    """The best of `repeat` measurements of each body: what others do on the machine only adds."""
    # Loads the code.
    await read_and_hash(b"{}")
    await read_at_the_door("/v1/completions", b"{}")
    collect_seldom()
    base_ms = min([await longest_prompt() for _ in range(repeat)])
    seconds: dict[str, dict[str, float | str]] = {}
    kinds: list[tuple[str, int, Callable[[], Awaitable[bool]]]] = [
        (name, len(raw), partial(read_and_hash, raw)) for name, raw in hostile_bodies(size)
    ]
    kinds += [
        (f"door: {name}", len(raw), partial(read_at_the_door, path, raw))
        for name, path, raw in hostile_door_bodies(door_size)
    ]
    for name, num_bytes, read in kinds:
        runs = [await measure(read()) for _ in range(repeat)]
        hold_ms, cpu_ms = min(r[0] for r in runs), min(r[1] for r in runs)
        seconds[name] = {
            "size_mb": num_bytes / 1e6,
            "answer": "accepted" if runs[0][2] else "refused",
            "hold_ms": hold_ms,
            "cpu_ms": cpu_ms,
            "times": cpu_ms / base_ms,
        }
    return seconds


@click.command(cls=Command)
@click.option("--size", default=MAX_BYTES, show_default=True, type=POSITIVE, help="Bytes a body.")
@click.option(
    "--door-size", default=DOOR_BYTES, show_default=True, type=POSITIVE, help="Bytes at the door."
)
@click.option("--repeat", default=3, show_default=True, type=POSITIVE, help="The best of so many.")
@json_option
def main(size: int, door_size: int, repeat: int, json_file: Path | None) -> None:
    """Read hostile bodies; fails if one holds the event loop for too long."""
    results = run(figures(size, door_size, repeat))
    title = f"Bodies of {size:,} bytes, at the front door of {door_size:,}"
    heads = ("body", "MB", "answer", "holds the loop, ms", "CPU, ms", "times")
    cells = table(*heads, left=("body", "answer"), title=title)
    for name, row in results.items():
        cells.add_row(
            name,
            f"{row['size_mb']:.1f}",
            str(row["answer"]),
            *(f"{row[key]:.1f}" for key in ("hold_ms", "cpu_ms", "times")),
        )
    Console(width=100).print(cells)
    save(results, json_file)
    slow = [name for name, row in results.items() if float(row["hold_ms"]) > LIMIT_MS]
    if slow:
        raise click.ClickException(f"over {LIMIT_MS:g} ms: {', '.join(slow)}")


if __name__ == "__main__":
    main()
