"""Rows that scripts take several of: both sides read the order of their fields here.

`-- @fields <name>` in lua/ stands for one of FIELDS.
"""

from __future__ import annotations

from typing import NamedTuple

from app.core.loads import LOAD_FIELDS


class ReserveRow(NamedTuple):
    inc: int
    request_id: str
    prefill_tokens: int
    prefill_us: int
    blocks: int
    attempt: str
    max_requests: int
    seen_total: int
    retry: int
    carried: int
    sending_ms: int
    receiving_ms: int
    fetch: str


class ExtendRow(NamedTuple):
    id: str
    attempt: str
    inc: int | str
    prefill_tokens: int
    prefill_us: int
    blocks: int
    state: str


class PrefillCompleteRow(NamedTuple):
    id: str
    ttl_ms: int
    began_by_ms: int
    of_source: int
    late_ms: int


class UsageRow(NamedTuple):
    key: str
    tenant: str
    model: str
    requests: int
    failed: int
    refused: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    waited_ms: int
    by_router: int


class AdmitRow(NamedTuple):
    key: str
    asks: int
    held: int
    concurrent: int
    requests: str
    tokens: str
    uncached: str
    num_requests: int
    num_tokens: int
    num_uncached: int
    prompt_tokens: int
    cached_tokens: int


class ReleaseRow(NamedTuple):
    id: str
    attempt: str
    began_by_ms: int
    came: int
    late_ms: int


FIELDS: dict[str, tuple[str, ...]] = {
    "load": LOAD_FIELDS,
    "reserve": ReserveRow._fields,
    "extend": ExtendRow._fields,
    "prefill_complete": PrefillCompleteRow._fields,
    "release": ReleaseRow._fields,
    "admit": AdmitRow._fields,
    "count": UsageRow._fields,
}
