"""Engines that show themselves as vLLM with NixlConnector, and hand KV on to each other: by their
rules, and so also too late, and other prompts' then."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from tests.fakes.engine import BLOCK_SIZE, FakeEngine, chain_of

WRONG = "wrong "
STEP_S = 0.02
_ENGINES = {}
_IDS = itertools.count()
_COUNTERS = (
    "nixl_num_kv_expired_reqs_total",
    "nixl_num_notifications_after_expiry_total",
    "nixl_num_failed_transfers_total",
    "nixl_xfer_time_seconds_count",
)


@dataclass(slots=True)
class Kept:
    until_s: float
    wanted_by: PdEngine | None = None


class PdEngine(FakeEngine):
    """A NIXL peer whose blocks are written anew once their lease has ended.

    counts: whether /metrics has NixlConnector's counters. tells_start: whether it says there when
    it started. tells_lease: whether it says how it is set. is_deaf: while it stands still, it hears
    of no request that is given up, and fetches for that first of all.
    """

    def __init__(
        self,
        *,
        kv_lease_s=30.0,
        counts=True,
        tells_start=True,
        tells_lease=True,
        is_deaf=False,
        **options,
    ):
        super().__init__(**options)
        self.engine_id = f"engine-{next(_IDS)}"
        self.transferred = 0
        self.fails_transfers = False
        self.params = {}
        self._kept = {}
        self._kv_lease_s = kv_lease_s
        self._has_counts, self._tells_start, self._is_deaf = counts, tells_start, is_deaf
        if tells_lease:
            extra = {"kv_lease_duration": kv_lease_s}
            connector = {"kv_connector": "NixlConnector", "kv_connector_extra_config": extra}
            self.says["/server_info"] = {"vllm_config": {"kv_transfer_config": connector}}
        self._steps = []
        self._tainted = set()
        """Blocks that it holds as what they are not."""
        self._unheard = 0
        """Fetches too late that it will count in its next step."""

    @asynccontextmanager
    async def serving(self, port):
        _ENGINES[self.engine_id] = self
        async with asyncio.TaskGroup() as tasks, super().serving(port):
            self._begin = tasks.create_task
            self._steps = [self._begin(self._step())]
            yield
            for task in self._steps:
                task.cancel()

    def restart(self):
        self.events.restart()
        self._kept.clear()
        self._counters.clear()
        self.started_s = time.time()
        self._drop_blocks()

    def _drop_blocks(self):
        self._tainted.clear()
        super()._drop_blocks()

    def _exposed(self):
        for line in super()._exposed():
            if self._tells_start or not line.startswith("process_start_time"):
                yield line
        labels = f'engine="0",model_name="{self._models[0]}"'
        for name in _COUNTERS if self._has_counts else ():
            yield f"vllm:{name}{{{labels}}} {self._counters[name]}"

    async def _step(self):
        """Steps as an engine that computes or holds a lease; an idle one counts nothing."""
        while True:
            await asyncio.sleep(STEP_S)
            if not self._kept and not self.running:
                continue
            self._counters["iteration_tokens_total_count"] += 1
            self._hear()
            now_s = time.monotonic()
            for kept_id, kept in list(self._kept.items()):
                if kept.wanted_by is not None and kept.wanted_by.faults.how != "stall":
                    kept.until_s = max(kept.until_s, now_s + self._kv_lease_s * 2 / 3)
                if kept.until_s <= now_s:
                    del self._kept[kept_id]
                    self._counters["nixl_num_kv_expired_reqs_total"] += 1

    def _hear(self):
        self._counters["nixl_num_notifications_after_expiry_total"] += self._unheard
        self._unheard = 0

    async def _tokens(self, dialect, ids, faults):
        params = dialect.body.get("kv_transfer_params") or {}
        if params.get("do_remote_prefill"):
            await self._fetch(params, ids)
        if self._tainted & set(chain_of(ids)):
            dialect.said = replace(dialect.said, tokens=[WRONG] * dialect.num_tokens)
        async for number in super()._tokens(dialect, ids, faults):
            self._hear()
            yield number
        if params.get("do_remote_decode"):
            dialect.members = {"kv_transfer_params": self._keep(ids)}

    def _keep(self, ids):
        kept_id = f"kept-{next(_IDS)}"
        self._kept[kept_id] = Kept(time.monotonic() + self._kv_lease_s)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, len(ids) // BLOCK_SIZE + 2))],
            "remote_engine_id": self.engine_id,
            "remote_request_id": kept_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": len(ids),
            "transfer_mode": "pull",
        } | self.params

    async def _fetch(self, params, ids):
        """Waits for a place, sending heartbeats, then reads: vLLM's order."""
        source = _ENGINES[params["remote_engine_id"]]
        kept = source._kept.get(params["remote_request_id"])
        if kept is not None:
            kept.wanted_by = self
        try:
            async with self._slots:  # until it has a place
                pass
            await self._while_ill("stall")
        except asyncio.CancelledError:
            going = self._let_go(source, params["remote_request_id"], ids)
            self._steps.append(self._begin(going))
            raise
        finally:
            if kept is not None:
                kept.wanted_by = None
        self._read(source, params["remote_request_id"], ids)

    async def _let_go(self, source, kept_id, ids):
        """Drops what was kept for a request that was given up, once the engine goes on."""
        await self._while_ill("stall")
        if self._is_deaf:
            self._read(source, kept_id, ids)
        elif source._kept.pop(kept_id, None) is None:
            source._unheard += 1

    def _read(self, source, kept_id, ids):
        if self.fails_transfers:
            self._counters["nixl_num_failed_transfers_total"] += 1
            return
        self.transferred += 1
        self._counters["nixl_xfer_time_seconds_count"] += 1
        if source._kept.pop(kept_id, None) is None:
            source._unheard += 1
            self._tainted |= set(chain_of(ids))
