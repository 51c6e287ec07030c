"""Long prompts that workers compute for requests in flight, for all replicas to see.

Prompts that begin alike share a hash of one field each: a look-up reads it whole, a decision adds
its field, and the request's first token or end takes the field away. A field has the prompt's
blocks at `chains.POSITIONS` alone, which is short of what is computed by a ninth at most.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from app.core.chains import hex_text, positions
from app.core.keys import Keyspace
from app.core.types import Incarnation, SequenceHash
from app.state.scripts import Call, command

MOST = 64
"""Prompts that begin alike and are recorded: a look-up reads them all."""
_FIELD = re.compile(rb"(\d{1,15}) (\d{1,15}) ([0-9a-f]+)")


class Computing(NamedTuple):
    """Prompts in flight that begin like one. blocks: its leading blocks that each incarnation
    computes. num: prompts. over: attempts whose time is over."""

    blocks: dict[Incarnation, int]
    num: int
    over: list[bytes]


def alike(chain: Sequence[SequenceHash], num_blocks: int) -> str:
    """Returns the name shared by prompts with about the same first `num_blocks` blocks; "" if the
    prompt is shorter."""
    reached = positions(num_blocks)
    return f"{chain[reached[-1] - 1]:016x}" if reached and reached[-1] <= len(chain) else ""


def computing(keyspace: Keyspace, name: str) -> Call[dict[bytes, bytes]]:
    """Returns the fields of all prompts in flight of that name, for `parsed`."""

    def parse(reply: list[bytes]) -> dict[bytes, bytes]:
        return dict(zip(reply[::2], reply[1::2], strict=True))

    return command("computing", "HGETALL", keyspace["computing:"] + name, parse=parse)


def parsed(
    fields: Mapping[bytes, bytes], chain: Sequence[SequenceHash], num_blocks: int, now_ms: int
) -> Computing:
    """Returns what the fields tell about a prompt with `chain`."""
    reached, own = _sampled(chain, num_blocks)
    blocks: dict[Incarnation, int] = {}
    over = []
    for attempt, text in fields.items():
        match = _FIELD.fullmatch(text)
        if match is None or int(match[2]) <= now_ms:
            over.append(attempt)
            continue
        shared = _num_shared(own, match[3])
        if shared:
            inc = Incarnation(int(match[1]))
            blocks[inc] = max(blocks.get(inc, 0), reached[shared - 1])
    return Computing(blocks, len(fields) - len(over), over)


def compute(
    keyspace: Keyspace,
    name: str,
    attempt: str,
    incarnation: Incarnation,
    chain: Sequence[SequenceHash],
    num_blocks: int,
    until_ms: int,
    ttl_ms: int,
) -> list[Call[int]]:
    """Records that `incarnation` computes a prompt until `until_ms`, Redis clock, in ttl_ms from
    now."""
    key = keyspace["computing:"] + name
    _, own = _sampled(chain, num_blocks)
    text = b"%d %d %b" % (incarnation, until_ms, own)
    return [
        command("compute", "HSET", key, attempt, text, parse=int),
        command("compute", "PEXPIRE", key, ttl_ms, parse=int),
    ]


def computed(keyspace: Keyspace, name: str, attempts: Sequence[str | bytes]) -> Call[int]:
    """Takes back what was recorded for attempts."""
    return command("computed", "HDEL", keyspace["computing:"] + name, *attempts, parse=int)


def _sampled(chain: Sequence[SequenceHash], num_blocks: int) -> tuple[Sequence[int], bytes]:
    """Returns the positions from that of `alike` on, and the chain's blocks there."""
    reached = positions(len(chain))[len(positions(num_blocks)) - 1 :]
    return reached, hex_text([chain[n - 1] for n in reached])


def _num_shared(one: bytes, other: bytes) -> int:
    """Returns how many leading hashes of 16 digits two texts share. A hash stands for all before
    it."""
    most = min(len(one), len(other)) // 16

    def differs(n: int) -> bool:
        return one[16 * n : 16 * n + 16] != other[16 * n : 16 * n + 16]

    return bisect_left(range(most), True, key=differs)
