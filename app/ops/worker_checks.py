"""Checks of a namespace's live workers, without a look at Redis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from app.core.check import Check, page
from app.core.errors import cut
from app.core.roles import Role
from app.core.trust import Trust
from app.core.worker_report import WorkerInfo
from app.ops.names import Names
from app.ops.names import check as check_names
from app.ops.terminal import counted
from app.ops.workers import WorkerStatus, live_in
from app.policy.pairing import differences, group_of, unknown_of
from app.policy.record import DecisionSummary
from app.policy.view import View

Checks = Iterator[Check]
FRESH_S = 2.0
MIN_DECISIONS, MAX_DECISIONS = 50, 500
HIT_RATE_GAP = 0.15
NOT_PREDICTED = 0.1
"""Share of a worker's decisions. What it reports is of all of its requests, so that nothing can be
compared where more were decided without a prediction, as after an outage of Redis."""
MIN_LEASE_S = 120.0
MINUTES = f"{MIN_LEASE_S:g} s or more"


START_ONE = "start a worker, or an agent, whose log says which engines it finds"


def of_view(view: View, namespace: str, names: Names, records: Iterable[DecisionSummary]) -> Checks:
    """Yields the checks of the workers in a view. records: the newest decision first."""
    live = live_in(view)
    text = f"{len(view.infos)} take requests"
    yield from of_fleet(text, view.infos, view.away_s, [*view.infos, *view.paused.values()])
    if live:
        yield from of_workers(live, namespace, names)
        # Who fails requests computes none of what was predicted for them.
        yield predicted(records, [w for w in live if w.incarnation not in view.marks])


def of_fleet(
    text: str,
    infos: Sequence[WorkerInfo],
    away_s: Iterable[float | None],
    alive: Iterable[WorkerInfo],
) -> Checks:
    """Yields whether there are workers, agents and engines, and what they say of themselves.

    text: how many there are. infos: of workers that get requests. away_s: for how long each one's
    agent has been away; None: it is not. alive: of all workers, those that get none too.
    """
    yield Check("workers", bool(infos), text, START_ONE)
    yield agents(dict(zip([str(info.key) for info in infos], away_s, strict=True)))
    yield engines(alive)
    yield from below_exact(infos)
    yield from findings(infos)


def of_workers(
    live: list[WorkerStatus],
    namespace: str,
    names: Names,
) -> Checks:
    """Yields checks of live workers. names: those that they serve."""
    infos = [w.info for w in live if w.info]
    yield from _alike(infos)
    yield _contexts(infos)
    yield _adapters(infos)
    yield from of_transfers(infos)
    yield check_names(names, namespace, infos)
    ages = [(w.info.key, w.metrics_age_s) for w in live if w.info]
    late = [f"{key}: {age:.0f} s ago" for key, age in ages if age is not None and age > FRESH_S]
    late += [f"{key}: never" for key, age in ages if age is None]
    yield Check(
        "metrics",
        not late,
        cut("; ".join(late)) or f"all published within {FRESH_S:g} s",
        "is Redis full, the agent overloaded, or have workers and routers different Redis servers?",
    )


def agents(away_s: Mapping[str, float | None]) -> Check:
    """Checks whether agents are away. away_s: for how long, by worker; None: the agent is there."""
    away = [f"{worker} for {s:.0f} s" for worker, s in away_s.items() if s is not None]
    return Check(
        "agents",
        not away,
        cut(f"{len(away)} of {len(away_s)} are away: {', '.join(away)}" if away else "")
        or "all are heard of",
        "start them again: their engines answer and are routed to, by what was known of them last; "
        f"see {page('failures.md')}",
    )


def engines(infos: Iterable[WorkerInfo]) -> Check:
    """Checks whether agents take engines to be ill. infos: of workers that are alive."""
    ill = [f"{info.key} {info.ill}" for info in infos if info.ill]
    return Check(
        "engines",
        not ill,
        cut("; ".join(ill)) or "none is ill",
        "see their own logs; each is asked further, and is back once it works again",
    )


def findings(infos: Iterable[WorkerInfo]) -> Checks:
    """Yields a check for each thing that workers, engines and agents say is wrong."""
    workers_of: dict[str, list[str]] = {}
    for info in infos:
        for finding in info.findings:
            workers_of.setdefault(finding, []).append(str(info.key))
    for finding, keys in workers_of.items():
        what, _, remedy = finding.partition(": ")
        yield Check("findings", False, f"{cut(', '.join(keys))}: {what}", remedy)


def below_exact(infos: Iterable[WorkerInfo]) -> Checks:
    """Yields a check for each cause for which workers are not exact. It fails where an engine
    publishes what it caches, and its agent does not hear that."""
    by_cause: dict[tuple[Trust, str, bool], list[str]] = {}
    for info in infos:
        if info.trust is not Trust.EXACT:
            is_unheard = info.trust is Trust.APPROXIMATE and bool(info.event_addresses)
            rung = info.trust, info.trust_cause, is_unheard
            by_cause.setdefault(rung, []).append(str(info.key))
    for (trust, cause, is_unheard), keys in by_cause.items():
        workers = cut(", ".join(keys))
        if is_unheard:
            why, _, remedy = cause.partition(": ")
            yield Check("events", False, f"{workers}: {why}, so that it is {trust}", remedy)
        else:
            yield Check(f"{trust} workers", None, f"{workers}: {cause}")


def _alike(infos: list[WorkerInfo]) -> Checks:
    """Yields checks of what all workers of a namespace must have in common."""
    for about, field, why in (
        ("block size", "block_size", "start them with the same --block-size"),
        ("models", "models", "give each model a --namespace of its own"),
        ("tokenizer", "tokenizer_hash", "start all engines with the same model and revision"),
    ):
        values: dict[Any, list[str]] = {}
        for info in infos:
            value = getattr(info, field)
            if value not in ("", (), 0):
                values.setdefault(value, []).append(str(info.key))
        told = sum(map(len, values.values()))
        if len(values) > 1:
            shown = "; ".join(f"{_text(value)} ({keys[0]})" for value, keys in values.items())
            yield Check(about, False, cut(shown), why)
        elif told < len(infos):
            yield Check(about, None, f"not known of {counted(len(infos) - told, 'worker')}")
        else:
            yield Check(about, True, f"{_text(next(iter(values)))}, the same on all workers")


def _contexts(infos: list[WorkerInfo]) -> Check:
    about = "context length"
    lengths = sorted({info.max_model_len for info in infos if info.max_model_len})
    if silent := sum(not info.max_model_len for info in infos):
        return Check(about, None, f"not known of {counted(silent, 'worker')}")
    if len(lengths) < 2:
        return Check(about, True, f"{lengths[0] if lengths else 0:,}, the same on all workers")
    text = f"{lengths[0]:,} to {lengths[-1]:,}: each request goes where it fits"
    return Check(about, True, text)


def _adapters(infos: list[WorkerInfo]) -> Check:
    on = Counter(name for info in infos for name in info.adapters)
    some = [f"{name} on {number} of {len(infos)}" for name, number in on.items()]
    return Check(
        "adapters",
        all(number == len(infos) for number in on.values()),
        cut("; ".join(some)) or "none",
        "load each on all engines: requests for it go only where it is",
    )


def _text(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def predicted(records: Iterable[DecisionSummary], workers: list[WorkerStatus]) -> Check:
    """Checks whether workers report the share of prompt tokens as cached that decisions predicted.

    records: the newest first.
    """
    asked: dict[str, list[DecisionSummary]] = {}
    for record in records:
        asked.setdefault(record.worker, []).append(record)
    gaps, compared = [], 0
    for worker in workers:
        if worker.info is None:
            continue
        key = str(worker.info.key)
        share = _predicted_share(asked.get(key, [])[:MAX_DECISIONS], worker.info.block_size)
        if share is None:
            continue
        compared += 1
        if abs(share - worker.hit_rate) > HIT_RATE_GAP:
            gaps.append(f"{key}: {share:.0%} predicted, {worker.hit_rate:.0%} reported")
    text = f"{counted(compared, 'worker')} with {MIN_DECISIONS} or more recorded predictions"
    return Check(
        "cache hits",
        not gaps if compared else None,
        "; ".join(gaps[:3]) if gaps else f"{'as predicted' if compared else 'not known'}: {text}",
        "do clients send the prompts that they route, tokenized alike, to the worker chosen?",
    )


def _predicted_share(decided: list[DecisionSummary], block_size: int) -> float | None:
    """Returns the share of one worker's prompt tokens that was predicted to be cached, or None if
    too little was predicted. A worker that gets KV from another reports that as cached."""
    told = [one for one in decided if one.trust is Trust.EXACT and not one.source]
    if len(told) < max(MIN_DECISIONS, (1.0 - NOT_PREDICTED) * len(decided)):
        return None
    cached = sum(one.overlap.total for one in told) * block_size
    return cached / max(1, sum(one.isl_tokens for one in told))


def of_transfers(infos: Sequence[WorkerInfo]) -> Checks:
    """Yields checks of KV that travels; none where no worker hands KV on, or has a role."""
    able = [info for info in infos if info.kv_transfer]
    if not able and all(info.role is Role.BOTH for info in infos):
        return
    protocols = Counter(info.kv_transfer for info in able)
    shown = ", ".join(f"{name} ({number})" for name, number in sorted(protocols.items()))
    yield Check(
        "kv transfer",
        len(protocols) == 1 and len(able) > 1,
        shown or "by none",
        "give two workers or more the same --kv-transfer: KV travels between those alone",
    )
    yield _roles(able)
    yield _pairs(able)
    yield from _leases(able)
    if "nixl" in protocols:
        yield Check(
            "kv transfer settings",
            None,
            "engines do not tell them: kv_load_failure_policy recompute belongs in each "
            "--kv-transfer-config, and each must reach the other's side channel: see "
            f"{page('disaggregation.md')}",
        )


def _pairs(able: Sequence[WorkerInfo]) -> Check:
    """Checks whether all may use each other's KV."""
    told = []
    for name, keys_of in differences(able):
        said = ", ".join(
            f"{value or 'none'} ({', '.join(keys)})" for value, keys in keys_of.items()
        )
        told.append(f"{name}: {said}")
    silent = {str(info.key): unknown_of(info) for info in able if group_of(info) is None}
    told += [f"{key} does not tell its {', '.join(names)}" for key, names in silent.items()]
    return Check(
        "kv transfer pairs",
        not told,
        cut("; ".join(told)) or "all are equal in what decides whether KV is right elsewhere",
        "KV travels between equals alone: start engines alike. Where one does not tell, give its "
        "agent --side-channel-port, or all agents of engines that are alike one --kv-compatible",
    )


def _leases(able: Sequence[WorkerInfo]) -> Checks:
    """Checks how long sources keep what waits to be fetched, as far as that is known."""
    told = Counter(info.kv_lease_s for info in able if info.kv_lease_s)
    if not told:
        return
    shown = ", ".join(f"{seconds:g} s ({number})" for seconds, number in sorted(told.items()))
    is_short = any(i.kv_transfer == "nixl" and 0 < i.kv_lease_s < MIN_LEASE_S for i in able)
    yield Check(
        "kv transfer lease",
        None if is_short else True,
        f"{shown}, for sure"
        + (f"; a kv_lease_duration of {MINUTES} loses less, and waits less" if is_short else ""),
    )


def _roles(able: Sequence[WorkerInfo]) -> Check:
    """Checks whether each worker with a role has one that does the other half."""
    number = Counter(info.role for info in able)
    wanted = "prefill" if number[Role.DECODE] else "decode"
    is_alone = not number[Role.BOTH] and len(number) == 1
    return Check(
        "roles",
        not is_alone,
        ", ".join(f"{role.value} ({count})" for role, count in number.items()) or "none transfers",
        f"start a worker with --role {wanted}, or without one",
    )
