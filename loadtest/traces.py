"""Recorded traffic as requests with prompts: who asks when, with which tokens.

Two formats of JSON lines are read; the fields of the first line show which. Both hold lengths and
opaque block ids instead of text. Equal ids mean equal tokens.

open loop (the Mooncake FAST'25 traces): `timestamp` (ms from the start, in bins of 3 s),
`input_length`, `output_length` (tokens), `hash_ids` (one per 512 tokens, the last may be partial).

closed loop (agentic sessions): `session`, `turn`, `input_length`, `output_length`, `keep`,
`hash_ids` (one per full 256 tokens). A request's blocks are the first `keep` of the session's
previous turn followed by `hash_ids`. A session's first turn has `timestamp` (ms from the start);
later ones have `think_ms`, the wait after the previous answer is complete.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from app.core.settings.kinds import PRIORITIES

DEMO_TRACE = Path(__file__).parent / "data" / "conversation-demo.jsonl"

OPEN_LOOP_BLOCK_TOKENS = 512
CLOSED_LOOP_BLOCK_TOKENS = 256
BIN_MS = 3_000

COPY_STRIDE = 1 << 40
"""Distance between the ids of a block and of its copy; all ids of a trace are below."""

VOCABULARY = 32_000
"""Token ids are below this, so that any model of the Llama family accepts them."""

UNIQUE_POSITIONS = 1 << 63
"""Positions from here on belong to single requests; those of shared blocks are below."""
UNIQUE_STRIDE_BITS = 24
MAX_INPUT_TOKENS = 1 << UNIQUE_STRIDE_BITS
"""Past it, two requests would share what is unique to each."""
MAX_TIMESTAMP_MS = 10**9
"""Twelve days. What is larger counts from 1970, be it in seconds: a replay would wait for years."""


class TraceError(ValueError):
    """A trace cannot be read; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    index: int
    """Number within the trace, in order of lines, from 0."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Ids of the leading blocks, in prompt order; the prompt may end inside the last one."""
    block_tokens: int
    think_s: float = 0.0
    """Wait after the answer to the session's previous turn."""
    priority: str = "normal"

    def prompt(self, seed: int = 0) -> NDArray[np.uint32]:
        """The prompt's tokens, (input_tokens,). The same for the same trace and seed."""
        ids = np.array(self.blocks, dtype=np.uint64)[:, np.newaxis]
        offsets = np.arange(self.block_tokens, dtype=np.uint64)
        shared = (ids * np.uint64(self.block_tokens) + offsets).ravel()[: self.input_tokens]
        first = UNIQUE_POSITIONS + (self.index << UNIQUE_STRIDE_BITS)
        rest = np.arange(self.input_tokens - shared.size, dtype=np.uint64) + np.uint64(first)
        return pseudo_random_tokens(np.concatenate((shared, rest)), seed)


@dataclass(frozen=True, slots=True)
class Session:
    """Requests played one after another, each after the answer to the one before."""

    start_s: float
    turns: tuple[TraceRequest, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    sessions: tuple[Session, ...]

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def span_s(self) -> float:
        """Seconds as if another session followed the last one after the mean gap between
        sessions."""
        last_s, number = self.sessions[-1].start_s, len(self.sessions)
        return last_s * number / max(1, number - 1) or 1.0

    def cut(
        self,
        start_s: float = 0.0,
        duration_s: float | None = None,
        requests: int | None = None,
    ) -> Trace:
        """Sessions that start in `[start_s, start_s + duration_s)`, at most `requests` requests.

        Times then count from start_s. The last session may lose its later turns.
        """
        end_s = float("inf") if duration_s is None else start_s + duration_s
        inside = (s for s in self.sessions if start_s <= s.start_s < end_s)
        shifted = (replace(s, start_s=s.start_s - start_s) for s in inside)
        return replace(self, sessions=tuple(_first_requests(shifted, requests)))

    def repeated(self, times: int, *, in_turn: bool = False) -> Trace:
        """Each session `times` times, each with its own tokens: spread evenly over the same span,
        or one whole trace after the other.

        Blocks that several sessions share, such as a system prompt, stay shared.
        """
        sessions_of = Counter(
            block for s in self.sessions for block in {b for turn in s.turns for b in turn.blocks}
        )
        span_s = self.span_s
        alone = {block for block, sessions in sessions_of.items() if sessions == 1}
        size = self.num_requests

        def copied(request: TraceRequest, number: int) -> TraceRequest:
            blocks = (b + number * COPY_STRIDE if b in alone else b for b in request.blocks)
            return replace(request, index=request.index + number * size, blocks=tuple(blocks))

        copies = [
            Session(
                session.start_s + number * span_s
                if in_turn
                else (session.start_s + number / times * span_s) % span_s,
                tuple(copied(turn, number) for turn in session.turns),
            )
            for number in range(times)
            for session in self.sessions
        ]
        return replace(self, sessions=tuple(sorted(copies, key=lambda session: session.start_s)))

    def at_load(self, factor: float) -> Trace:
        """Sessions start `factor` times as often; think times stay."""
        return replace(
            self, sessions=tuple(replace(s, start_s=s.start_s / factor) for s in self.sessions)
        )


def read_trace(path: Path) -> Trace:
    """Raises TraceError for a file that is missing or empty, or has a bad line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        hint = "; only a checkout has the demo's trace" if path == DEMO_TRACE else ""
        raise TraceError(f"{path}: {error.strerror}{hint}") from error
    records = [_Record(path.name, number, line) for number, line in enumerate(lines, 1)]
    if not records:
        raise TraceError(f"{path.name}: holds no requests")
    read = _read_closed_loop if "session" in records[0].fields else _read_open_loop
    sessions = sorted(read(records), key=lambda session: session.start_s)
    return Trace(path.stem, tuple(sessions))


def pseudo_random_tokens(positions: NDArray[np.uint64], seed: int) -> NDArray[np.uint32]:
    """One token per position, below VOCABULARY: the finaliser of splitmix64 (Steele et al. 2014).

    Distinct positions give independent tokens, so that distinct blocks never share content.
    """
    mixed = positions + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    tokens = ((mixed >> np.uint64(32)) * np.uint64(VOCABULARY)) >> np.uint64(32)
    return tokens.astype(np.uint32)


class _Record:
    """One line of a trace, whose fields are checked as they are read."""

    def __init__(self, file: str, line: int, text: bytes) -> None:
        self._where = f"{file}:{line}"
        try:
            fields = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise TraceError(f"{self._where}: not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise TraceError(f"{self._where}: not an object")
        self.fields: dict[str, Any] = fields

    def bad(self, field: str, problem: str) -> TraceError:
        return TraceError(f"{self._where}: field {field!r}: {problem}")

    def number(self, field: str, at_least: int = 0, at_most: int | None = None) -> int:
        value = self.fields.get(field)
        if type(value) is not int or value < at_least:
            raise self.bad(field, f"expected a whole number from {at_least}, found {value!r}")
        if at_most is not None and value > at_most:
            raise self.bad(field, f"expected at most {at_most}, found {value}")
        return value

    def input_tokens(self) -> int:
        return self.number("input_length", at_least=1, at_most=MAX_INPUT_TOKENS)

    def priority(self) -> str:
        value = self.fields.get("priority", "normal")
        if value not in PRIORITIES:
            raise self.bad("priority", f"expected one of {', '.join(PRIORITIES)}, found {value!r}")
        return str(value)

    def timestamp_ms(self) -> int:
        return self.number("timestamp", at_most=MAX_TIMESTAMP_MS)

    def block_ids(self, field: str) -> tuple[int, ...]:
        value = self.fields.get(field)
        if not isinstance(value, list) or not all(
            type(v) is int and 0 <= v < COPY_STRIDE for v in value
        ):
            raise self.bad(field, f"expected a list of whole numbers from 0 to {COPY_STRIDE - 1}")
        return tuple(value)


def _first_requests(sessions: Iterable[Session], requests: int | None) -> Iterator[Session]:
    left = sys.maxsize if requests is None else requests
    for session in sessions:
        if left <= 0:
            return
        turns = session.turns[:left]
        left -= len(turns)
        yield replace(session, turns=turns)


def _read_open_loop(records: list[_Record]) -> Iterator[Session]:
    numbered = sorted(enumerate(records), key=lambda item: item[1].timestamp_ms())

    def bin_of(item: tuple[int, _Record]) -> int:
        # Rounded, because timestamps are a few milliseconds off their bin's start.
        return (item[1].timestamp_ms() + BIN_MS // 2) // BIN_MS

    for number, group in groupby(numbered, key=bin_of):
        members = list(group)
        for place, (index, record) in enumerate(members):
            start_s = (number + (place + 0.5) / len(members)) * BIN_MS / 1000
            yield Session(start_s, (_open_loop_request(index, record),))


def _open_loop_request(index: int, record: _Record) -> TraceRequest:
    input_tokens = record.input_tokens()
    blocks = record.block_ids("hash_ids")
    num_blocks = -(-input_tokens // OPEN_LOOP_BLOCK_TOKENS)
    if len(blocks) > num_blocks:
        raise record.bad("hash_ids", f"{len(blocks)} ids, but the input has {num_blocks} blocks")
    return TraceRequest(
        index=index,
        input_tokens=input_tokens,
        output_tokens=record.number("output_length", at_least=1),
        blocks=blocks,
        block_tokens=OPEN_LOOP_BLOCK_TOKENS,
        priority=record.priority(),
    )


def _read_closed_loop(records: list[_Record]) -> Iterator[Session]:
    def session_of(item: tuple[int, _Record]) -> int:
        return item[1].number("session")

    for _, group in groupby(sorted(enumerate(records), key=session_of), key=session_of):
        turns: list[TraceRequest] = []
        start_s = 0.0
        for index, record in group:
            if record.number("turn") != len(turns):
                raise record.bad("turn", f"expected {len(turns)}, the session's next turn")
            if not turns:
                start_s = record.timestamp_ms() / 1000
            turns.append(_closed_loop_request(index, record, turns))
        yield Session(start_s, tuple(turns))


def _closed_loop_request(index: int, record: _Record, before: list[TraceRequest]) -> TraceRequest:
    input_tokens = record.input_tokens()
    keep = record.number("keep")
    previous = before[-1].blocks if before else ()
    if keep > len(previous):
        raise record.bad("keep", f"{keep} blocks, but the turn before has {len(previous)}")
    blocks = previous[:keep] + record.block_ids("hash_ids")
    full_blocks = input_tokens // CLOSED_LOOP_BLOCK_TOKENS
    if len(blocks) > full_blocks:
        raise record.bad("hash_ids", f"{len(blocks)} ids, but the input has {full_blocks} blocks")
    return TraceRequest(
        index=index,
        input_tokens=input_tokens,
        output_tokens=record.number("output_length", at_least=1),
        blocks=blocks,
        block_tokens=CLOSED_LOOP_BLOCK_TOKENS,
        think_s=record.number("think_ms") / 1000 if before else 0.0,
        priority=record.priority(),
    )
