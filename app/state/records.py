"""Rows that scripts take several of: both sides read the order of their fields here.

`-- @fields <name>` in lua/ stands for one of FIELDS.
"""

from __future__ import annotations

from collections import namedtuple

from app.core.loads import LOAD_FIELDS
from app.core.usage import UsageSums, Who

ReserveRow = namedtuple(
    "ReserveRow",
    "inc request_id prefill_tokens prefill_us blocks attempt max_requests seen_total retry carried "
    "sending_ms receiving_ms fetch flow",
)
ExtendRow = namedtuple("ExtendRow", "id attempt inc prefill_tokens prefill_us blocks state")
PrefillCompleteRow = namedtuple("PrefillCompleteRow", "id ttl_ms began_by_ms of_source late_ms")
ReleaseRow = namedtuple("ReleaseRow", "id attempt began_by_ms came late_ms")
AdmitRow = namedtuple(
    "AdmitRow",
    "key asks held concurrent requests_full requests_each tokens_full tokens_each uncached_full "
    "uncached_each num_requests num_tokens num_uncached prompt_tokens cached_tokens",
)

FIELDS: dict[str, tuple[str, ...]] = {
    "load": LOAD_FIELDS,
    "reserve": ReserveRow._fields,
    "extend": ExtendRow._fields,
    "prefill_complete": PrefillCompleteRow._fields,
    "release": ReleaseRow._fields,
    "admit": AdmitRow._fields,
    "count": (*Who._fields, *UsageSums._fields),
}
