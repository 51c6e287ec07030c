"""Load in engines that no router reserved: others use them, too, or have left something there.

An engine counts everybody's requests. What routers had reserved when its counts were read is taken
off, so that nobody's own request counts twice; the rest is load like any other, and counts less the
longer ago it was read. Where a report does not say what was reserved then, what is reserved now is
taken off, and some more, as the report still counts requests that have ended since.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.core.loads import LOAD_FIELDS
from app.core.worker_report import ForwardPassMetrics, Speed

Floats = NDArray[np.float64]

FRESH_S = 3.0
"""Agents read counts every second or so, and routers have them a moment later."""
HALF_S = 5.0
"""A report that is older than FRESH_S loses half of its weight in each such time."""
UNSEEN = 1.0
"""Requests that may come and go between the counts of an engine and those of Redis."""
UNTOLD_SHARE, UNTOLD_REQUESTS = 0.25, 8.0
"""Share of what is reserved now, and requests besides, that may have been reserved in addition when
counts were read that do not say."""
OUTPUTS = 3.0
"""Mean answers that a request in flight has written, at most: only its prompt is reserved, and long
answers are met more often."""
SPARE = 0.1
"""Share of an engine's blocks that may be in use for no request, such as those that wait to be
fetched."""
MEAN_PREFILL_TOKENS = 1_000.0
"""Assumed of waiting prompts where an engine does not say how long its prompts are."""

ROWS = (
    *("running", "waiting", "used", "total", "reserved", "decoding", "reserved_blocks"),
    *("read_ms", "prefill_tokens", "prefill_s", "answer_tokens"),
)
_RUNNING, _WAITING, _USED, _TOTAL, _RESERVED, _DECODING, _BLOCKS, _READ_MS, *_ = range(len(ROWS))
_TOKENS, _PREFILL_S, _ANSWER = range(_READ_MS + 1, len(ROWS))
_REQUESTS_NOW, _DECODING_NOW, _BLOCKS_NOW = map(
    LOAD_FIELDS.index, ("requests", "decoding", "blocks")
)


def row_of(
    report: ForwardPassMetrics, total_blocks: int, speed: Speed, at_ms: int
) -> tuple[float, ...]:
    """Returns the ROWS of one worker; NaN for what was reserved, if it does not say.

    total_blocks: of its device. at_ms: when it reported.
    """
    untold = report.reserved_requests is None
    tokens = report.mean_prefill_tokens or MEAN_PREFILL_TOKENS
    seconds = speed.prefill_s_per_token * tokens + speed.prefill_s_per_token2 * tokens**2 / 2
    return (
        report.request_active_slots,
        report.num_requests_waiting,
        report.kv_active_blocks,
        total_blocks,
        math.nan if untold else report.reserved_requests or 0,
        math.nan if untold else report.reserved_decoding or 0,
        math.nan if untold else report.reserved_blocks or 0,
        at_ms - 1000 * (report.read_s_ago or 0.0),
        tokens,
        seconds,
        speed.mean_output_tokens,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Others:
    """Load that no router reserved; (workers,) each.

    running, waiting: requests. blocks: that these use, or will once they run. prefill_tokens,
    prefill_s: of those that wait.
    """

    running: Floats
    waiting: Floats
    blocks: Floats
    prefill_tokens: Floats
    prefill_s: Floats

    @property
    def requests(self) -> Floats:
        return self.running + self.waiting


def may_exceed(rows: Floats, block_size: int) -> bool:
    """Whether any worker may have more than was reserved. rows: (ROWS, workers)."""
    reserved = np.nan_to_num(rows[_RESERVED], nan=UNTOLD_REQUESTS)
    excess, held = _beyond(rows, reserved, np.nan_to_num(rows[_BLOCKS]), block_size)
    return bool(excess.any() or held.any())


def others_of(rows: Floats, loads: Floats, now_ms: int, block_size: int) -> Others:
    """Returns the load that no router reserved.

    rows: (ROWS, workers). loads: (LOAD_FIELDS, workers), at now_ms.
    """
    is_untold = np.isnan(rows[_RESERVED])
    requests, decoding, blocks = loads[[_REQUESTS_NOW, _DECODING_NOW, _BLOCKS_NOW]]
    more = 1.0 + UNTOLD_SHARE
    reserved = np.where(is_untold, more * requests + UNTOLD_REQUESTS, rows[_RESERVED])
    decoding = np.where(is_untold, decoding, rows[_DECODING])
    blocks = np.where(is_untold, more * blocks, rows[_BLOCKS])
    excess, held = _beyond(rows, reserved, blocks, block_size)
    # Those of ours without a first token may be among the engine's running ones: then fewer of the
    # others run.
    waiting = np.minimum(excess, np.maximum(rows[_WAITING] - (reserved - decoding), 0.0))
    late_s = np.maximum((now_ms - rows[_READ_MS]) / 1000 - FRESH_S, 0.0)
    weight = 0.5 ** (late_s / HALF_S)
    waiting *= weight
    tokens = waiting * rows[_TOKENS]
    return Others(
        running=excess * weight - waiting,
        waiting=waiting,
        blocks=held * weight + tokens / block_size,
        prefill_tokens=tokens,
        prefill_s=waiting * rows[_PREFILL_S],
    )


def _beyond(
    rows: Floats, reserved: Floats, blocks: Floats, block_size: int
) -> tuple[Floats, Floats]:
    """Returns requests in each engine beyond those reserved, and blocks beyond what these use."""
    excess = np.maximum(rows[_RUNNING] + rows[_WAITING] - reserved - UNSEEN, 0.0)
    written = OUTPUTS * reserved * rows[_ANSWER] / block_size
    spare = np.where(excess > 0.0, 0.0, SPARE * rows[_TOTAL])
    return excess, np.maximum(rows[_USED] - blocks - written - spare, 0.0)
