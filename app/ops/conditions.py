"""Conditions that somebody should hear of: one list, each with its one threshold.

The console and `kvroute doctor` look for them in what replicas told of the last minute;
deploy/alerts.yaml has the same for Prometheus, with the same thresholds, which a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from app.core.check import Check, page
from app.core.errors import cut
from app.core.outcomes import Kind
from app.ops.figures import (
    CHANGES,
    CPU,
    KV_FAILED,
    KV_LATE,
    LATE,
    LOOP_LATE,
    QUEUE,
    TARGET_S,
    UNKNOWN_MODEL,
    WINDOW_S,
    WRONG,
    Together,
    share,
)

FEW = 10
"""Requests in a minute below which no share is told."""
WAITING = 2
"""Requests that wait at a time below which no key is told that floods the fleet."""
MAX_TOLD = 3
FAILING = frozenset({"KvrouteRequestsFail", "KvrouteWorkerFailsRequests"})
"""Conditions that clients feel, which are told first."""
Judge = Callable[[Together, float], str]


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition with the name of its alert, which holds above `threshold`.

    judge: returns what to say, or "" if it does not hold. remedy: what to do; a function where that
    depends on the cause.
    """

    name: str
    threshold: float
    judge: Judge
    remedy: str | Callable[[Together], str]


def holding(all_of: Together) -> Iterator[Check]:
    """Yields the conditions that hold. Their alerts fire once they have held for a while."""
    for one in CONDITIONS:
        if text := one.judge(all_of, one.threshold):
            remedy = one.remedy if isinstance(one.remedy, str) else one.remedy(all_of)
            yield Check(one.name, False, text, remedy)


def _listed(said: Sequence[str]) -> str:
    more = [f"{len(said) - MAX_TOLD} more"] if len(said) > MAX_TOLD else []
    return "; ".join([*said[:MAX_TOLD], *more])


def _text(value: float, most: float, text: str) -> str:
    return text.format(value) if value > most else ""


def _count(name: str, text: str) -> Judge:
    return lambda all_of, most: _text(all_of.minute[name], most, text)


def _gauge(name: str, text: str) -> Judge:
    return lambda all_of, most: _text(all_of.gauges.get(name, 0.0), most, text)


def _share_of(prefix: str, name: str, text: str) -> Judge:
    """Judges the share of one count among those whose names begin with `prefix`."""
    return _of_many(prefix, lambda all_of, most: _text(all_of.share_of(prefix, name), most, text))


def _gauge_each(prefix: str, text: str) -> Judge:
    """Judges the gauge of each worker, model or replica."""

    def judge(all_of: Together, most: float) -> str:
        above = {
            name.removeprefix(prefix): value
            for name, value in all_of.gauges.items()
            if name.startswith(prefix) and value > most
        }
        worst = sorted(above, key=lambda name: (-above[name], name))
        return _listed([text.format(name, above[name]) for name in worst])

    return judge


def _of_many(prefix: str, judge: Judge) -> Judge:
    """Judges nothing where fewer than FEW are counted under names that begin with `prefix`."""
    return lambda all_of, most: judge(all_of, most) if all_of.sum_of(prefix) >= FEW else ""


def _of_each(rows: str, part: Sequence[str], text: str, of: Sequence[str] = tuple(Kind)) -> Judge:
    """Judges the share of `part` in `of`, of each model, worker or key."""

    def judge(all_of: Together, most: float) -> str:
        said = []
        for name, counts in sorted(getattr(all_of, rows).items()):
            whole = sum(counts[kind] for kind in of)
            if not name:  # a share of all, as each could have named one that is known
                whole = all_of.sum_of("ended:")
            value = share(sum(counts[kind] for kind in part), whole) or 0.0
            if whole >= FEW and value > most:
                said.append(text.format(value, name or "no known model"))
        return _listed(said)

    return judge


def _told_by(kind: str, text: str) -> Judge:
    """Judges what engines have counted. Each replica tells all that an engine counted."""

    def judge(all_of: Together, most: float) -> str:
        some = sorted(name for name, counts in all_of.workers.items() if counts[kind] > most)
        return text.format(cut(", ".join(some))) if some else ""

    return judge


def _refused(all_of: Together, most: float) -> str:
    text = "{:.0f} requests were refused in the last minute"
    return _text(all_of.refused(all_of.minute), most, text)


def _refused_remedy(all_of: Together) -> str:
    minute = all_of.minute
    if minute["suspensions"] or minute["ended:engine"]:
        return "workers fail what they get: the last errors say which, and why"
    if minute["decisions:all_busy"] or minute["decisions:overloaded"]:
        return "add workers, or let more requests wait, for longer: --wait-queue, --wait-timeout-s"
    return "are workers there that take requests? Their states and causes say why not"


def _unknown(all_of: Together, most: float) -> str:
    # A share of all requests, as each could have named a model that is there.
    value = all_of.share_of("outcome:", UNKNOWN_MODEL)
    if value <= most or all_of.minute[f"outcome:{UNKNOWN_MODEL}"] < FEW:
        return ""
    return f"{value:.0%} of all requests name a model that nobody serves"


def _slow(all_of: Together, most: float) -> str:
    p99_s = all_of.quantile("decision", 0.99) or 0.0
    return f"decisions take {p99_s * 1000:.0f} ms (p99)" if p99_s > most else ""


def _late(all_of: Together, most: float) -> str:
    in_time = all_of.in_time_share()
    late = 0.0 if in_time is None else 1.0 - in_time
    return _text(late, most, f"{{:.0%}} of first tokens took over {TARGET_S:g} s, or never came")


def _floods(all_of: Together, most: float) -> str:
    """Judges shares of what was computed and, as the fair line lets nobody compute most of it, of
    the time waited."""
    for counted, what in (("prompt", "prompt tokens are"), ("waited_s", "time waited is")):
        amounts = {name: counts[counted] for name, counts in all_of.keys.items()}
        largest = max(amounts, key=amounts.__getitem__, default="")
        value = share(amounts.get(largest, 0.0), sum(amounts.values())) or 0.0
        waited_s = sum(one["waited_s"] for one in all_of.keys.values())
        if value > most and len(amounts) > 1 and waited_s > WAITING * WINDOW_S:
            return f"{value:.0%} of the {what} {largest}'s, and requests wait"
    return ""


def _is_new(all_of: Together, most: float) -> str:
    rows, whole = all_of.keys, sum(one["requests"] for one in all_of.keys.values())
    # A replica that has just got its first request of a key says so, and others know better.
    new = {name for name, one in rows.items() if one["requests"] and one["new"] == one["requests"]}
    if not rows.keys() - new:
        return ""
    text = "{1}, a key that asked for nothing a minute ago, makes {0:.0%} of all requests"
    shares = {name: share(rows[name]["requests"], whole) or 0.0 for name in sorted(new)}
    much = (name for name in shares if shares[name] > most and rows[name]["requests"] >= FEW)
    return _listed([text.format(shares[name], name) for name in much])


def _apart(all_of: Together, most: float) -> str:
    value = share(all_of.minute["apart"], all_of.minute["compared"]) or 0.0
    text = "{:.0%} of prompt tokens are cached, not predicted, or the other way round"
    return _text(value, most, text)


def _by_engines(all_of: Together, most: float) -> str:
    value = all_of.share_of("tokens_from:", "engine")
    if value <= most:
        return ""
    spent_s = all_of.minute["stage_s:tokens"] / all_of.sum_of("tokens_from:")
    return (
        f"{value:.0%} of prompts are tokenized by engines; a request's tokens take {spent_s:.3f} s"
    )


_PAIRS = page("disaggregation.md")
FAILED = (Kind.ENGINE, Kind.CUT)
CONDITIONS = (
    Condition(
        "KvrouteRequestsFail",
        0.05,
        _of_each("models", FAILED, "{:.0%} of the requests for {} fail"),
        "see the last errors: they name the worker and say what its engine says",
    ),
    Condition(
        "KvrouteWorkerFailsRequests",
        0.2,
        _of_each("workers", ("failed", *FAILED), "{1} fails {0:.0%} of its own", ("failed", *Kind)),
        "see the last errors; drain or restart its engine: it gets hardly any requests meanwhile",
    ),
    Condition(
        "KvrouteClientsLeave",
        0.1,
        _of_each(
            "models",
            (Kind.LEFT_BEFORE,),
            "{:.0%} of the clients of {} leave before their first token",
        ),
        "does an engine hang, or is its queue long? See the workers' columns left and queue",
    ),
    Condition(
        "KvrouteRequestsUnfit",
        0.5,
        _of_each(
            "models", (WRONG,), "{:.0%} of the requests for {} are refused as wrong or not allowed"
        ),
        "was a model renamed, or a client changed? The last errors say what is refused",
    ),
    Condition(
        "KvrouteModelsUnknown",
        0.05,
        _unknown,
        "is a name misspelt, or was a model renamed? The last errors have the names",
    ),
    Condition(
        "KvrouteKeysRefused",
        0.2,
        _share_of("outcome:", "invalid_api_key", "{:.0%} of the requests have no valid key"),
        "was a key replaced? The access log has the clients' addresses",
    ),
    Condition(
        "KvrouteKeyLimited",
        0.2,
        _of_each(
            "keys", ("limited",), "{:.0%} of the requests of {} are over its limits", ("requests",)
        ),
        "raise the limits of the key, or tell whoever has it: `kvroute usage` says what it uses",
    ),
    Condition(
        "KvrouteKeyFloods",
        0.8,
        _floods,
        "limit the key: requests=, tokens= or concurrent= behind it in --api-key-file",
    ),
    Condition(
        "KvrouteKeyNew",
        0.5,
        _is_new,
        "is it meant? Limit the key: requests=, tokens= or concurrent= in --api-key-file",
    ),
    Condition("KvrouteRequestsRefused", 0.0, _refused, _refused_remedy),
    Condition(
        "KvrouteFirstTokensLate",
        1.0,
        _gauge_each(LATE, "first tokens of {0} come {1:.1f} s later than predicted"),
        "see its engine's log and load; it gets hardly any requests meanwhile",
    ),
    Condition(
        "KvrouteQueuesLong",
        TARGET_S,
        _gauge_each(QUEUE, "the shortest queue for {0} is {1:.0f} s of prompts"),
        "add workers: those that serve it have more to do than clients wait for",
    ),
    Condition(
        "KvrouteWorkersRestart",
        3.0,
        _gauge_each(CHANGES, "{0} has joined and left {1:.0f} times within an hour"),
        "its log, and that of its engine, say why it ends",
    ),
    Condition(
        "KvrouteLoopLate",
        0.04,
        _gauge_each(LOOP_LATE, "router {0} does all {1:.2f} s late: it is short of CPU"),
        "give each router a core of its own",
    ),
    Condition(
        "KvrouteRouterBusy",
        0.9,
        _gauge_each(CPU, "router {0} uses {1:.0%} of a core, and one is all that it can use"),
        "start more replicas",
    ),
    Condition(
        "KvrouteSlowFirstTokens",
        0.05,
        _of_many("ended:", _late),
        "is a worker's queue long? Metrics kvroute_door_stage_seconds say what takes the time",
    ),
    Condition(
        "KvrouteDegraded",
        0.0,
        _count("degraded", "{:.0f} requests were routed by load alone in the last minute"),
        "is Redis up, fast, and taking writes? See its latency and memory",
    ),
    Condition(
        "KvrouteBlind",
        0.0,
        _count("blind", "{:.0f} look-ups of the last minute found no overlap: a shard is away"),
        "is a node of the Cluster down?",
    ),
    Condition(
        "KvrouteSlowDecisions",
        0.1,
        _of_many("decisions:", _slow),
        "give routers and Redis a core of their own each",
    ),
    Condition(
        "KvrouteWorkersFail",
        0.0,
        _count("suspensions", "{:.0f} times in the last minute a worker failed a request"),
        "the last errors say which worker, and why",
    ),
    Condition(
        "KvrouteReservationsExpire",
        0.0,
        _count("reservations:expired", "{:.0f} reservations of the last minute were never ended"),
        "do clients of /v1/route end their requests? Do answers outlast --reservation-ttl-s?",
    ),
    Condition(
        "KvrouteEnginesTokenize",
        0.5,
        _of_many("tokens_from:", _by_engines),
        f"give routers the model's tokenizer: --tokenizers; see {page('tokenization.md')}",
    ),
    Condition(
        "KvrouteTokenizerApart",
        0.0,
        _gauge("tokenizer_apart", "{:.0f} models have another tokenizer here than in engines"),
        "give routers the engines' model and revision: /readiness says why",
    ),
    Condition(
        "KvrouteCacheApart",
        0.05,
        _of_many("ended:", _apart),
        "/readiness says where; do the engines publish events, and hash as routers do?",
    ),
    Condition(
        "KvrouteKvTransfersFail",
        0.0,
        _told_by(KV_FAILED, "{} failed in the last minute to fetch KV that others had computed"),
        f"their engines' logs say why; until then prompts are computed twice: see {_PAIRS}",
    ),
    Condition(
        "KvrouteKvFetchedLate",
        0.0,
        _told_by(KV_LATE, "KV of {} was fetched in the last minute after its lease had ended"),
        f"ask for a longer kv_lease_duration: see {_PAIRS}",
    ),
    Condition(
        "KvrouteIndexOverfull",
        4.0,
        _gauge("index_fill", "the index holds {:.1f} times the blocks it was laid out for"),
        "start the workers anew with a larger --index-blocks",
    ),
    Condition(
        "KvrouteRedisNearlyFull",
        0.9,
        _gauge("redis_fill", "{:.0%} of Redis's memory is in use"),
        "raise maxmemory: full, it takes no writes, leases lapse, and load alone decides",
    ),
    Condition(
        "KvrouteRedisMayEvict",
        0.0,
        _gauge("may_evict", "Redis may drop any key once it is full"),
        "CONFIG SET maxmemory-policy noeviction",
    ),
)
ELSEWHERE = {
    "KvrouteNoWorkers": "workers",
    "KvrouteWorkerStale": "metrics",
    "KvrouteAgentHearsNothing": "events",
    "KvrouteDiscoveryStale": "findings",
    "KvrouteAgentsAway": "agents",
    "KvrouteWorkerTainted": "tainted workers",
    "KvrouteReplicaDown": "replicas",
    "KvrouteTrafficGone": "traffic",
}
"""Alerts whose conditions are checks of what is in Redis, by the checks' names."""
