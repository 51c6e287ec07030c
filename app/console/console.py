"""The console of one replica: answers made of what the replica knows and what Redis has."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

from app.console import answers, roster, sampler
from app.console.answers import table
from app.console.kept import CachedAnswer, KeptAnswers
from app.console.sampler import Curves, Sampler
from app.console.tail import COLUMNS, DecisionFilter, DecisionTail, Entry, place
from app.core.check import Check
from app.core.errors import NamespaceMissing, RedisUnavailable
from app.core.key_rules import KeyRules
from app.core.keys import Keyspace
from app.core.types import Incarnation
from app.core.usage import UsageSums, added_up, tokens
from app.ops import checks, reuse, worker_checks
from app.ops.conditions import holding
from app.ops.drain import named
from app.ops.explain import explanation, find
from app.ops.figures import LONG_WINDOW_S, WINDOW_S, Together
from app.ops.names import names_of
from app.ops.reuse import usages
from app.ops.usage import as_dict, by_hour
from app.ops.workers import requests_on
from app.policy.view import View
from app.router.router import Router
from app.state import admission, events, last_errors, leases, planner, replicas
from app.state.connect import deadline
from app.state.last_errors import Errors
from app.state.scripts import ScriptRunner
from app.state.waiting import flows

TIMEOUT_S = 2.0
DAY_H = 24
USAGE_COLUMNS = (*UsageSums._fields, "cached_share")
FOLLOW_S = 0.25
SERVER_S = 5.0
CHECKS_S = 15.0
ERRORS_S = 1.0
LATE_MS = 2000
"""Age from which loads, which are looked up four times a second, say that Redis is away."""
MAX_ROWS = 200
MAX_ERRORS = 20
ERROR_COLUMNS = (
    *("last_ms", "first_ms", "requests", "model", "worker", "cause", "words", "request_id"),
)
WORKERS_DECISIONS = 20
LEVELS = {
    "lost": "bad",
    "ill": "bad",
    "away": "warn",
    "suspended": "warn",
    "replica_lost": "warn",
    "redis_away": "bad",
}
"""Level of each kind of event that is more than information."""


class Console:
    """Answers while `run` runs; all that ask Redis raise RedisUnavailable.

    replica: a name that no other one has. address: where it listens, for people.
    namespace_weights: returns the setting as it is now. apart: returns for each model whether its
    tokenizer differs from its engines'. key_rules: returns the limits of each key.
    """

    def __init__(
        self,
        router: Router,
        replica: str,
        address: str,
        version: str,
        namespace_weights: Callable[[], str] = str,
        apart: Callable[[], Mapping[str, bool]] = dict,
        key_rules: Callable[[], Mapping[str, KeyRules]] = dict,
    ) -> None:
        self._router = router
        self._key_rules = key_rules
        self._redis = router.redis
        self._keyspace = keyspace = Keyspace(router.namespace)
        self._replica = replica
        self._version = version
        self._sampler = Sampler(
            *(router, replica, address, version, namespace_weights), apart=apart
        )
        self._tail = DecisionTail(router.redis, keyspace)
        self._followed = CachedAnswer(self._tail.follow, FOLLOW_S)
        self._hour = Curves(router.redis, keyspace, minute=False)
        self._day = Curves(router.redis, keyspace, minute=True)
        self._server = CachedAnswer(self._ask_server, SERVER_S)
        self._checks = CachedAnswer(self._check, CHECKS_S)
        self._last_errors = CachedAnswer(self._ask_errors, ERRORS_S)
        self._values = CachedAnswer(lambda: planner.values(self._redis, keyspace), SERVER_S)
        self.answers = KeptAnswers(lambda: router.fleet.redis_now_ms)

    async def run(self) -> None:
        await self._sampler.run()

    async def _view(self) -> View | None:
        view, now_ms = self._router.fleet.last_view, self._router.fleet.redis_now_ms
        if view is None:
            with suppress(NamespaceMissing):
                return await self._router.refresh()
        if view is not None and now_ms is not None and now_ms - view.now_ms > LATE_MS:
            age_s = (now_ms - view.now_ms) / 1000
            raise RedisUnavailable(f"Redis last told of workers {age_s:.0f} s ago")
        return view

    async def overview(self) -> answers.Overview:
        view = await self._view()
        now_ms, said = await replicas.read(self._redis, self._keyspace)
        there = {
            name: (now_ms - at_ms, figures)
            for name, (at_ms, figures) in sorted(said.items())
            if now_ms - at_ms <= replicas.SPOKE_MS
        }
        together = Together(figures for _, figures in there.values())
        results = await self._checks.now()
        return {
            "namespace": self._router.namespace,
            "version": self._version,
            "window_s": WINDOW_S,
            "tiles": roster.tiles(together, view),
            "replicas": roster.replicas_table(there, self._replica),
            "redis": await self._server.now(),
            "models": roster.models_table(together, view),
            "errors": await self._errors(),
            "localities": together.localities(),
            "localities_window_s": LONG_WINDOW_S,
            "findings": roster.findings(results, holding(together)),
        }

    async def _errors(self, worker: str = "") -> answers.Rows:
        errors = await self._last_errors.now()
        rows = [one.as_dict() for one in errors if worker in ("", one.error.worker)]
        return table(ERROR_COLUMNS, rows[:MAX_ERRORS])

    async def _ask_server(self) -> answers.RedisState:
        node = self._redis.node_of(self._keyspace["meta"]).client
        began_s = time.perf_counter()
        async with deadline(TIMEOUT_S):
            await node.ping()
            rtt_s = time.perf_counter() - began_s
            server: Any = await node.info("server")
            memory: Any = await node.info("memory")
        return {
            "version": str(server.get("redis_version", "")),
            "used_bytes": memory.get("used_memory"),
            "max_bytes": memory.get("maxmemory"),
            "rtt_s": round(rtt_s, 6),
        }

    async def _ask_errors(self) -> list[Errors]:
        _, errors = await last_errors.read(self._redis, self._keyspace)
        return errors

    async def _check(self) -> list[Check]:
        results = [check async for check in checks.of_server(self._redis)]
        results += await checks.of_routers(self._redis, self._keyspace)
        view = await self._view()
        if view is not None:
            names = await names_of(self._redis, self._router.namespace, view.infos)
            await self._followed.now()
            records = [entry.record for entry in reversed(self._tail.entries)]
            results += worker_checks.of_view(view, self._router.namespace, names, records)
        return results

    async def workers(self) -> answers.Rows:
        return table(roster.COLUMNS, await self._rows())

    async def _rows(self) -> list[dict[str, Any]]:
        view = await self._view()
        if view is None:
            return []
        await self._followed.now()
        values, hits = await self._values.now(), self._tail.hits()
        rows = [
            row
            | {
                "unique_value_s": values.get(row["worker"].rpartition(":")[0]),
                "predicted_hit": hits.get(row["worker"]),
            }
            for row in self._sampler.roster.see(view)
        ]
        said = await replicas.present(self._redis, self._keyspace)
        ended = Together(said.values()).workers
        return roster.with_endings(rows, ended, await self._last_errors.now())

    async def worker(self, key: str) -> answers.WorkerShown | None:
        row = next((row for row in await self._rows() if row["worker"] == key), None)
        if row is None:
            return None
        own = [e for e in reversed(self._tail.entries) if e.record.worker == key]
        used = list(usages(entry.record for entry in own))[:WORKERS_DECISIONS]
        reserved = await requests_on(self._redis, self._keyspace, Incarnation(row["incarnation"]))
        return {
            "worker": row,
            "series": sampler.of_worker(await self._hour.since(0), key),
            "prefixes": {
                "columns": ("block", "num_blocks", "requests"),
                "rows": [[f"{u.block:016x}", u.num_blocks, u.requests] for u in used],
            },
            "decisions": {
                "columns": COLUMNS,
                "rows": [entry.row() for entry in own[:WORKERS_DECISIONS]],
            },
            "reserved": len(reserved),
            "errors": await self._errors(key),
        }

    async def decisions(
        self, after: str, limit: int, which: DecisionFilter
    ) -> answers.DecisionsShown:
        await self._followed.now()
        newer = [e for e in reversed(self._tail.entries) if place(e.id) > place(after)]
        rows = [entry.row() for entry in newer if which.takes(entry.record)]
        is_missed = bool(after) and self._tail.lacks(after)
        return self._shown(rows[:limit], after, is_missed=is_missed)

    async def decision(self, request_id: str) -> answers.DecisionsShown:
        await self._followed.now()
        rows = [e.row() for e in reversed(self._tail.entries) if e.record.request_id == request_id]
        if not rows:
            record = await find(self._redis, self._keyspace, request_id)
            if record is not None:
                rows = [Entry(f"{record.at_ms}-0", record, record.seen is not None).row()]
        return self._shown(rows, "", is_missed=False)

    def _shown(
        self, rows: list[list[Any]], after: str, *, is_missed: bool
    ) -> answers.DecisionsShown:
        last = self._tail.entries[-1].id if self._tail.entries else after
        return {"last": last, "missed": is_missed, "columns": COLUMNS, "rows": rows}

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        record = await find(self._redis, self._keyspace, request_id)
        return None if record is None else explanation(record)

    async def history(self, window_s: int) -> answers.HistoryShown:
        now_ms = self._router.fleet.redis_now_ms or 0
        is_long = window_s > sampler.HOUR_S
        curves = self._day if is_long else self._hour
        samples = await curves.since(now_ms - 1000 * window_s)
        step_ms = replicas.MINUTE_MS if is_long else replicas.STEP_MS
        answer = sampler.shown(samples, step_ms // 1000)
        if not is_long:
            answer["heat"] = sampler.heat(samples)
        return answer

    async def drain(self, name: str, *, undo: bool) -> answers.Drained | None:
        """Stop routing requests to a worker, or route them to it again. Returns None if there is
        no such worker."""
        keys = await named(self._redis, self._keyspace, name)
        if not keys:
            return None
        calls = [leases.drain(self._keyspace, key, undo=undo) for key in keys]
        left = await ScriptRunner(self._redis, TIMEOUT_S).run(calls)
        return {"worker": name, "draining": not undo, "left": sum(filter(None, left))}

    async def events(self, after: str, limit: int) -> answers.EventsShown:
        page = await events.read(self._redis, self._keyspace, after, limit)
        return {
            "last": page[0].id if page else after,
            "events": [
                {
                    "id": event.id,
                    "at_ms": event.at_ms,
                    "kind": event.kind,
                    "subject": event.subject,
                    "text": event.text,
                    "level": LEVELS.get(event.kind, "info"),
                }
                for event in page
            ],
        }

    async def reuse(self) -> reuse.ReuseShown:
        return reuse.together((await replicas.present(self._redis, self._keyspace)).values())

    async def usage(self) -> answers.Rows:
        hours = await by_hour(self._redis, self._keyspace, DAY_H)
        recent = added_up(chain(*hours[-2:]), "key")
        by_key = [added_up(rows, "key") for rows in hours]
        rows = [
            as_dict(one)
            | {
                "key": name,
                "recent": recent.get(name, UsageSums()).requests,
                "hours": [tokens(hour.get(name, UsageSums())) for hour in by_key],
            }
            for name, one in added_up(chain(*hours), "key").items()
        ]
        return table(("key", "recent", *USAGE_COLUMNS, "hours"), rows[:MAX_ROWS])

    async def waiting(self) -> answers.WaitingShown:
        waiting = await flows(self._redis, self._keyspace)
        return {
            "flows": {
                "columns": ("tenant", "priority", "requests", "oldest_s"),
                "rows": [
                    [flow.tenant, flow.priority, flow.requests, round(flow.oldest_s, 1)]
                    for flow in waiting[:MAX_ROWS]
                ],
            },
            "limits": {
                "columns": ("key", "limit", "used", "most"),
                "rows": await self._limits(),
            },
        }

    async def _limits(self) -> list[list[Any]]:
        limited = [one for one in self._key_rules().values() if one.is_limited][:MAX_ROWS]
        now_ms = self._router.fleet.redis_now_ms or 0
        read = [admission.used(self._keyspace, rules, now_ms) for rules in limited]
        used = await ScriptRunner(self._redis, TIMEOUT_S).run(read)
        return [
            [rules.name, f"{name}={getattr(rules, name)}", round(number), round(most)]
            for rules, by_name in zip(limited, used, strict=True)
            for name, (number, most) in by_name.items()
        ]
