"""Exceptions of kvroute; those of engines are in workers/engines/base.py.

KvrouteError
├── ConfigError           a setting is missing or bad; stops start-up
├── MissingPackage        a package that comes with an extra is not installed
├── InvalidRequest        a caller's input is bad; names the field and the value
├── BodyTooLarge          a request body exceeds the configured size
├── BodyTimeout           a request body stops coming, or comes too slowly
├── EncodingUnknown       a request body is encoded in a way that is not decoded here
├── BodiesTooLarge        all request bodies together have as many bytes as may be held
├── Unauthorized          a request carries no valid key
├── NotAllowed            a request asks for what its key does not allow
├── Crowded               too many wait for one of a few places, and this caller more than others
├── RedisUnavailable      Redis cannot be reached, or missed its deadline
│   ├── RedisFull         Redis has no memory left for a write; none of it was written
│   └── RedisRecovering   leases ran out while Redis was unreachable; they are about to be renewed
├── NamespaceMissing      Redis answers but holds no such namespace (yet, or any more)
├── NamespaceMismatch     a worker's block size or hash settings differ from its namespace's
│   └── WrongVersion      another release wrote the namespace, in another version of the data model
├── IncarnationLost       this incarnation may not write any more; the agent must resync
├── WorkerReplaced        another process registered as the same worker; this one must end
├── LeadershipLost        another planner leads; this one may change nothing
├── EngineUnavailable     the engine beside an agent does not answer, or is not ready yet
├── EngineUnfit           it answers, but cannot be followed as it is, or as the agent is set
├── BlockLost             a slot does not hold, or no longer holds, the block that it should
├── NotEnoughBlocks       a request needs more slots of a tier than are free
├── ClusterError          a process of `kvroute up` did not come up (app/local/cluster.py)
└── RoutingError          no decision is possible
    ├── NoWorkers         none is alive, or all are excluded
    ├── PromptTooLarge    no eligible worker has as many blocks as the prompt would fill
    ├── AllWorkersBusy    every eligible worker is full, and waiting for one was no use
    ├── RateLimited       its key's limits do not let it in for now (app/core/key_rules.py)
    └── RouterOverloaded  too many requests wait for a decision
"""

from __future__ import annotations

import numpy as np

MAX_SHOWN = 80
"""Characters of a caller's input, which may be megabytes, that a message repeats at most."""


def cut(text: str, most: int = MAX_SHOWN) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown(value: object) -> str:
    """Returns `value` as messages show it, without looking at more of a large value than is
    shown."""
    return cut(_repr(value, MAX_SHOWN + 1))


def _repr(value: object, most: int) -> str:
    """Returns repr(value), or at least its first `most` characters. Each level of nesting takes one
    of them, so this bounds the depth too, which JSON parsers allow to be deeper than repr does."""
    if isinstance(value, str | bytes):
        return repr(value[:most])
    if isinstance(value, np.ndarray):  # as which ids that were sent as a list are kept
        value = value[:most].tolist()
    if not isinstance(value, dict | list):
        return repr(value)
    text, end = ("{", "}") if isinstance(value, dict) else ("[", "]")
    for item in value:
        if len(text) >= most:
            return text
        text += ", " if len(text) > 1 else ""
        if isinstance(value, dict):
            text += f"{_repr(item, most)}: "
            item = value[item]
        text += _repr(item, max(1, most - len(text)))
    return text + end


def without_values(message: str) -> str:
    """Returns a message for the log, cut before `got`, which precedes what callers sent: perhaps a
    prompt."""
    return message.partition(", got ")[0]


class KvrouteError(Exception):
    """Root of the tree drawn above."""


class ConfigError(KvrouteError):
    """A setting is missing or bad."""


class MissingPackage(KvrouteError):
    """A package is not installed that comes with an extra."""

    def __init__(self, package: str, extra: str, reason: str = "") -> None:
        but = f"{reason}, but " if reason else ""
        super().__init__(
            f"{but}{package} is missing: pip install '.[{extra}]' in a clone of kvroute, or "
            f"'WHEEL[{extra}]' of its wheel"
        )


class InvalidRequest(KvrouteError):
    """A caller's input is bad. field: its name, as the caller spelled it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class BodyTooLarge(KvrouteError):
    """A request body exceeds the configured size."""


class Unauthorized(KvrouteError):
    """A request carries no valid key."""


class NotAllowed(InvalidRequest):
    """A request asks for what its key does not allow.

    field: the member that asks for it.
    """


class Crowded(KvrouteError):
    """Too many requests wait for one of a few places, and this caller has more of them than
    others."""


class BodyTimeout(KvrouteError):
    """A caller began a request body that stopped coming, or came too slowly."""


class EncodingUnknown(KvrouteError):
    """A request body has a content encoding that is not decoded here."""


class BodiesTooLarge(KvrouteError):
    """The bodies of all callers together have as many bytes as may be held."""


class RedisUnavailable(KvrouteError):
    """Redis cannot be reached, or missed its deadline."""


class RedisFull(RedisUnavailable):
    """Redis has no memory left for a write, and wrote none of it."""


class RedisRecovering(RedisUnavailable):
    """Redis answers again, but leases ran out meanwhile; their owners are about to renew them."""


class NamespaceMissing(KvrouteError):
    """Redis answers but holds no such namespace."""


class NamespaceMismatch(KvrouteError):
    """A worker does not fit the namespace it registers in."""


class WrongVersion(NamespaceMismatch):
    """A namespace holds a version of the data model that this release does not speak."""

    def __init__(self, namespace: str, held: int, spoken: int) -> None:
        super().__init__(
            f"namespace {namespace!r} holds version {held} of the data model, but this release of "
            f"kvroute speaks version {spoken}: run it in a --namespace of its own"
        )


class IncarnationLost(KvrouteError):
    """Another incarnation has replaced this one, its lease lapsed, or Redis lost it."""


class WorkerReplaced(KvrouteError):
    """Another process registered as the same worker; this one must end."""


class LeadershipLost(KvrouteError):
    """Another planner leads, or may by now; this one may change nothing."""


class EngineUnavailable(KvrouteError):
    """The engine beside an agent does not answer, or is not ready yet; it may be, later."""


class EngineUnfit(KvrouteError):
    """The engine beside an agent answers, but not what is needed to follow it; it may, later."""


class BlockLost(KvrouteError):
    """A block cannot be read, is not what was written, or its slot now holds another."""


class NotEnoughBlocks(KvrouteError):
    """A request needs more slots of a tier than are free; it was given none. kept: how many slots,
    idle or leaving, hold what the request would share. Evicting them would make it need as many
    more."""

    def __init__(self, needed: int, free: int, kept: int = 0) -> None:
        super().__init__(f"not enough blocks: {needed} needed, {free} free")
        self.needed = needed
        self.free = free
        self.kept = kept


class RoutingError(KvrouteError):
    """No decision is possible. outcome: the decision's label in the metrics."""

    outcome = "failed"


class NoWorkers(RoutingError):
    """No worker is alive, or all are excluded."""

    outcome = "no_workers"


class PromptTooLarge(RoutingError):
    """The prompt has more blocks than any eligible worker."""

    outcome = "too_large"


class AllWorkersBusy(RoutingError):
    """No eligible worker can take another request now, or could while this one waited.

    retry_after_s: predicted time until the worker with the shortest queue has prefilled all of it.
    """

    outcome = "all_busy"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Superseded(RoutingError):
    """A later try of the same request holds its reservation."""

    outcome = "superseded"


class RouterOverloaded(RoutingError):
    """Too many requests wait for a decision already."""

    outcome = "overloaded"


def printable(text: str) -> str:
    """Returns `text` with JSON's escapes for every character that is not printable.

    So a worker's name or a path cannot end the line, move the cursor, change colours, or turn the
    direction of text: C0 and C1, line separators, bidi controls, odd spaces, surrogates and
    unassigned characters are escaped. JSON keeps its meaning.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
