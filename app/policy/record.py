"""Decisions as a stream of Redis keeps them: to be explained, and priced again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import orjson
from msgspec import Meta, Raw, Struct

from app.core.chains import hex_text, positions
from app.core.outcomes import Ending
from app.core.pace import Pace
from app.core.settings.kinds import MOST, PRIORITIES
from app.core.trust import Trust
from app.core.types import SequenceHash, TierOverlap
from app.policy.affinity import Affinity, discounted
from app.policy.cost import (
    AWAY_TERM,
    COMPUTING,
    FAILED_TERM,
    LATE_TERM,
    SHARED_TERM,
    Candidates,
    Costs,
    Floats,
    RequestSize,
)
from app.policy.locality import Best, Locality
from app.policy.policies import POLICIES

if TYPE_CHECKING:
    from app.policy.plan import Plan

DETAILED_WORKERS = 64
"""Candidates are recorded less often with more workers: of 1,000 they are 160 KB of Redis's memory
each time, and 20 routers could record them 400 times a second."""
ROWS = tuple(f.name for f in fields(Candidates))
OTHER_TERMS = (COMPUTING, SHARED_TERM, LATE_TERM, AWAY_TERM, FAILED_TERM)
"""Terms that do not follow from the candidates."""


@dataclass(slots=True, eq=False)
class ChoiceInputs:
    """Everything that one choice was made from.

    eligible: which workers the request allows, (workers,). others: the terms OTHER_TERMS that
    its costs had, (workers,) each.
    """

    workers: list[str]
    block_size: int
    candidates: Candidates
    eligible: Sequence[bool]
    affinity: Affinity | None = None
    others: dict[str, Floats] = field(default_factory=dict)


Count = Annotated[int, Meta(ge=0)]


class DecisionSummary(Struct, omit_defaults=True):
    """One decision, and what came of its request if that ended soon.

    at_ms: when loads were looked up, by the Redis clock. hex_blocks: 16 digits for each block of
    the prompt at `positions` of `full_blocks`.
    source: `<kind> <worker key>`, where the worker gets blocks of the prompt from; "": from
    nowhere.
    model: the model or adapter that was asked for; "": whichever the namespace has. part_tokens: of
    the longest prompt; 0: it has one. ending: None: the stream of endings may tell it.
    """

    request_id: str
    at_ms: int
    worker: str
    policy: str
    locality: Locality
    isl_tokens: Annotated[int, Meta(ge=1, le=MOST)]
    full_blocks: Count
    overlap: TierOverlap
    best: Best
    tries: Count
    waited_ms: Count
    hex_blocks: Annotated[str, Meta(pattern="^[0-9a-f]*$")] = msgspec.field(name="blocks")
    trust: Trust = Trust.EXACT
    tenant: str = ""
    priority: str = "normal"
    model: str = ""
    source: str = ""
    part_tokens: Count = 0
    ending: Ending | None = None

    @property
    def blocks(self) -> list[SequenceHash]:
        text = self.hex_blocks
        return [SequenceHash(int(text[at : at + 16], 16)) for at in range(0, len(text), 16)]


class DecisionRecord(DecisionSummary, kw_only=True):
    """A decision; of a few, with all that they were made from."""

    seen: ChoiceInputs | None = None

    @property
    def size(self) -> RequestSize:
        """Raises AssertionError for a record without `seen`."""
        assert self.seen is not None
        return RequestSize(self.isl_tokens, self.seen.block_size, self.priority, self.part_tokens)

    @property
    def costs(self) -> Costs:
        """Costs that the decision was made by. Raises AssertionError for a record without
        `seen`."""
        seen = self.seen
        assert seen is not None
        cost = POLICIES[self.policy].cost
        if seen.affinity is not None:
            cost = discounted(cost, seen.affinity)
        costs = cost(seen.candidates, self.size)
        return Costs(sum(seen.others.values(), costs.cost), costs.terms | seen.others)


def record_of(
    plan: Plan, details: Pace, now_s: float, ending: Ending | None = None
) -> DecisionRecord:
    """Returns the record to keep of a decision. As many as `details` allows by `now_s` have
    all inputs; more than DETAILED_WORKERS count as several decisions."""
    decision, request, view = plan.decision, plan.query.request, plan.view
    seen: ChoiceInputs | None = None
    if request.explain or details.allows(now_s, max(1.0, len(view.infos) / DETAILED_WORKERS)):
        terms = plan.choice.costs.terms
        seen = ChoiceInputs(
            [str(info.key) for info in view.infos],
            *(plan.size.block_size, plan.candidates, plan.who.targets.tolist(), plan.affinity),
            {name: terms[name] for name in OTHER_TERMS if name in terms},
        )
    source = decision.source
    return DecisionRecord(
        request_id=decision.request_id,
        at_ms=view.now_ms,
        worker=str(decision.worker.key),
        source=f"{source.kind} {source.worker.key}" if source is not None else "",
        policy=decision.policy,
        trust=decision.trust,
        tenant=request.tenant,
        priority=request.priority,
        model=request.model,
        locality=decision.locality,
        isl_tokens=decision.isl_tokens,
        part_tokens=request.part_tokens,
        full_blocks=len(request.chain),
        overlap=decision.overlap,
        best=decision.best,
        tries=decision.tries,
        waited_ms=decision.waited_ms,
        hex_blocks=hex_text(sampled(request.chain)).decode(),
        ending=ending,
        seen=seen,
    )


def sampled(chain: Sequence[SequenceHash]) -> list[SequenceHash]:
    """Returns the blocks of a chain that are recorded: the same for all chains that share them."""
    return [chain[at - 1] for at in positions(len(chain))]


def encode(record: DecisionRecord) -> bytes:
    return _encoder.encode(record)


def decode(text: bytes) -> DecisionRecord:
    """Returns the record in JSON of `encode`. Raises ValueError for one that cannot be explained,
    or priced again."""
    record = _decoder.decode(text)
    _check(record)
    if record.seen is not None:
        _check_inputs(record.seen)
    return record


def decode_summary(text: bytes) -> tuple[DecisionSummary, bool]:
    """Returns the record in JSON of `encode` without its candidates, which take 2 ms with a
    thousand workers, and whether there are any. Raises ValueError."""
    summary = _summary_decoder.decode(text)
    _check(summary)
    # In a text, quotes would be escaped.
    return summary, b'"seen":{' in text


def _check(record: DecisionSummary) -> None:
    if record.policy not in POLICIES or record.priority not in PRIORITIES:
        raise ValueError(f"policy {record.policy!r}, priority {record.priority!r}")
    if len(record.hex_blocks) % 16:
        raise ValueError(f"blocks: {len(record.hex_blocks)} digits")


def _check_inputs(seen: ChoiceInputs) -> None:
    workers = len(seen.workers)
    columns = [getattr(seen.candidates, name) for name in ROWS] + [*seen.others.values()]
    if len(seen.eligible) != workers or any(column.shape != (workers,) for column in columns):
        raise ValueError(f"seen: a column does not fit {workers} workers")
    if seen.block_size < 1:
        raise ValueError(f"seen: a block has {seen.block_size} tokens")
    if seen.affinity is not None and not 0 <= seen.affinity.position < workers:
        raise ValueError(f"seen: {seen.affinity} does not fit {workers} workers")
    limits = seen.candidates.max_requests
    limits[np.isnan(limits)] = np.inf  # which JSON does not have
    if any(np.isnan(column).any() for column in columns):
        raise ValueError("seen: a candidate lacks a value")


def _to_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return Raw(orjson.dumps(value.astype(np.float32), option=orjson.OPT_SERIALIZE_NUMPY))
    raise NotImplementedError(f"{type(value).__name__}")


def _from_json(kind: Any, value: Any) -> Any:
    try:
        return np.array(value, dtype=np.float64)
    except TypeError as error:
        raise ValueError(f"seen: {error}") from None


_encoder = msgspec.json.Encoder(enc_hook=_to_json)
_decoder = msgspec.json.Decoder(DecisionRecord, dec_hook=_from_json)
_summary_decoder = msgspec.json.Decoder(DecisionSummary)
