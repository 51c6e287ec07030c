"""A decision as it is kept in a stream of Redis: to be explained, and priced again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, astuple, dataclass, field, fields
from operator import attrgetter
from typing import Any, get_type_hints

import numpy as np
import orjson

from app.core.chains import hex_text, positions
from app.core.settings.kinds import MOST, PRIORITIES
from app.core.trust import Trust
from app.core.types import SequenceHash, TierOverlap
from app.core.worker_report import DEFAULT_SPEED
from app.policy.affinity import Affinity, discounted
from app.policy.cost import (
    AWAY_TERM,
    FAILED_TERM,
    LATE_TERM,
    POLICIES,
    Candidates,
    CostFunction,
    Costs,
    Floats,
    RequestSize,
)
from app.policy.in_flight import COMPUTING
from app.policy.locality import Best, Locality

ROWS = tuple(f.name for f in fields(Candidates))
ADDED = {"others_requests": 0.0, "decode_s": DEFAULT_SPEED.decode_s}
"""What records of earlier releases lack, and what is assumed there."""
NOT_OF_CANDIDATES = (COMPUTING, LATE_TERM, AWAY_TERM, FAILED_TERM)
"""Terms that do not follow from the candidates."""


@dataclass(slots=True, eq=False)
class ChoiceInputs:
    """All that one choice was made from. eligible: which the request allows, (workers,).

    others: the terms NOT_OF_CANDIDATES that its costs had, (workers,) each.
    """

    workers: list[str]
    block_size: int
    candidates: Candidates
    eligible: Sequence[bool]
    affinity: Affinity | None = None
    others: dict[str, Floats] = field(default_factory=dict)

    def priced(self, cost: CostFunction, *, again: bool) -> CostFunction:
        """`cost`, plus what the request's session was worth; and where it is priced again, as it
        was, plus the others."""
        mine = cost if self.affinity is None else discounted(cost, self.affinity)
        if not (again and self.others):
            return mine

        def with_others(candidates: Candidates, size: RequestSize) -> Costs:
            costs = mine(candidates, size)
            return Costs(sum(self.others.values(), costs.cost), costs.terms | self.others)

        return with_others


Blocks = Sequence[SequenceHash]


@dataclass(slots=True)
class DecisionRecord:
    """One decision. Its fields are those of a stream entry, as text by their types: see CODECS.

    at_ms: when loads were looked up, by the Redis clock. blocks: those of the prompt at
    `positions` of `full_blocks`. seen: for a few decisions only.
    """

    request_id: str
    at_ms: int
    worker: str
    policy: str
    locality: Locality
    isl_tokens: int
    full_blocks: int
    overlap: TierOverlap
    best: Best
    tries: int
    waited_ms: int
    blocks: Blocks
    seen: ChoiceInputs | None = None
    trust: Trust = Trust.EXACT
    tenant: str = ""
    priority: str = "normal"
    model: str = ""
    """Model or adapter that was asked for; "": whichever the namespace has."""
    source: str = ""
    """`<kind> <worker key>`: where the worker gets blocks of the prompt from; "": from nowhere."""

    @property
    def size(self) -> RequestSize:
        """Raises AssertionError for a record without `seen`."""
        assert self.seen is not None
        return RequestSize(self.isl_tokens, self.seen.block_size, self.priority)

    @property
    def costs(self) -> Costs:
        """What it was made by. Raises as `size`."""
        assert self.seen is not None
        cost = self.seen.priced(POLICIES[self.policy].cost, again=True)
        return cost(self.seen.candidates, self.size)


def sampled(chain: Sequence[SequenceHash]) -> list[SequenceHash]:
    """The blocks of a chain that are recorded: the same for all chains that share them."""
    return [chain[at - 1] for at in positions(len(chain))]


def encode(record: DecisionRecord) -> tuple[Any, ...]:
    """Values of a stream entry, in the order of ENTRY."""
    values = list(_values_of(record))
    for place, to_text in _ENCODERS:
        values[place] = to_text(values[place])
    return tuple(values)


def decode(entry: Mapping[bytes, bytes]) -> DecisionRecord:
    """The record in a stream entry. Raises LookupError, TypeError or ValueError for an invalid one:
    what it returns can be explained, and priced again."""
    text = {name.decode(): value.decode() for name, value in entry.items()}
    # Those of another release may lack what has a default.
    values = {n: of_text(text[n]) for n, of_text in _DECODERS if n in text or n not in _OPTIONAL}
    record = DecisionRecord(**values)
    if record.policy not in POLICIES or not 1 <= record.isl_tokens <= MOST:
        raise ValueError(f"{record.isl_tokens} tokens, {record.policy!r}")
    if record.priority not in PRIORITIES:
        raise ValueError(f"priority {record.priority!r}")
    return record


def _best_of(text: str) -> Best:
    worker, _, blocks = text.rpartition(" ")
    return Best(worker, int(blocks))


def _blocks_of(text: str) -> Blocks:
    return [SequenceHash(int(text[i : i + 16], 16)) for i in range(0, len(text), 16)]


def _seen_text(seen: ChoiceInputs | None) -> bytes:
    if seen is None:
        return b""
    columns = {name: getattr(seen.candidates, name).astype(np.float32) for name in ROWS}
    return orjson.dumps(
        {
            "workers": seen.workers,
            "block_size": seen.block_size,
            "eligible": [bool(ok) for ok in seen.eligible],
            "affinity": seen.affinity and astuple(seen.affinity),
            "others": {name: term.astype(np.float32) for name, term in seen.others.items()},
            **columns,
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def _seen_of(text: str) -> ChoiceInputs | None:
    if not text:
        return None
    values = orjson.loads(text)
    block_size, places = values["block_size"], range(len(values["workers"]))
    for name, value in ADDED.items():
        values.setdefault(name, [value] * len(places))
    others = dict(values.get("others", {}))
    names = [*ROWS, *others]
    matrix = np.array([*(values[name] for name in ROWS), *others.values()], dtype=np.float64)
    if matrix.shape != (len(names), len(places)) or len(values["eligible"]) != len(places):
        raise ValueError(f"seen: {matrix.shape} does not fit {len(places)} workers")
    if block_size < 1:
        raise ValueError(f"seen: a block has {block_size} tokens")
    limits = matrix[ROWS.index("max_requests")]
    limits[np.isnan(limits)] = math.inf  # which JSON does not have
    if np.isnan(matrix).any():
        raise ValueError("seen: a candidate lacks a value")
    of_candidates, terms = matrix[: len(ROWS)], matrix[len(ROWS) :]
    affinity: Affinity | None = None
    if values["affinity"] is not None:
        position, fraction, max_queue_s = values["affinity"]
        most_s = math.inf if max_queue_s is None else float(max_queue_s)
        affinity = Affinity(places[position], float(fraction), most_s)
    return ChoiceInputs(
        *(values["workers"], block_size, Candidates(*of_candidates), values["eligible"], affinity),
        dict(zip(others, terms, strict=True)),
    )


CODECS: Mapping[Any, tuple[Callable[[Any], Any], Callable[[str], Any]]] = {
    str: (str, str),
    int: (int, int),
    Locality: (str, {reason.value: reason for reason in Locality}.__getitem__),
    Trust: (str, Trust),
    TierOverlap: (
        lambda o: f"{o.device} {o.host} {o.disk}",
        lambda text: TierOverlap(*map(int, text.split())),
    ),
    Best: (lambda best: f"{best.worker} {best.blocks}", _best_of),
    Blocks: (hex_text, _blocks_of),
    ChoiceInputs | None: (_seen_text, _seen_of),
}
"""How a field of each type is written into an entry, and read from its text."""
_TYPES = get_type_hints(DecisionRecord)
ENTRY = tuple(f.name for f in fields(DecisionRecord))
"""Fields of a stream entry."""
_PLAIN = (str, int, Locality, Trust)
"""Which redis-py writes as they are."""
_ENCODERS = [
    (place, CODECS[_TYPES[name]][0])
    for place, name in enumerate(ENTRY)
    if _TYPES[name] not in _PLAIN
]
_values_of = attrgetter(*ENTRY)
_DECODERS = [(name, CODECS[_TYPES[name]][1]) for name in ENTRY]
_OPTIONAL = {f.name for f in fields(DecisionRecord) if f.default is not MISSING}
