"""Limits of keys: requests are let in as one counter for all replicas says, in Redis."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.core.key_rules import KeyRules, Rate, RateLimited, Spending
from app.core.keys import Keyspace
from app.core.types import random_hex
from app.policy.decision import RouteRequest
from app.state import admission
from app.state.admission import Admitted
from app.state.records import AdmitRow
from app.state.scripts import Call

LEASE_S = 10.0
"""Requests of a replica that says no more of them count so long: then a killed one's places are
free."""
RENEW_S = 1.0
SETTLED_S = 2.0
"""Seconds after Redis was away, in which all replicas have said what they hold."""
BLOCKED_S = 1.0
"""Longest time for which requests are refused without asking Redis."""
MEAN_OUTPUT_TOKENS = 256.0
LATELY = 0.05
"""Weight of the last answer in the mean length of a key's answers."""


@dataclass(slots=True)
class _Alone:
    """One replica's part of a bucket while Redis is away. level: at `at_s`, monotonic."""

    rate: Rate
    parts: int
    level: float
    at_s: float

    def wait_s(self, cost: float, now_s: float) -> float:
        """Returns seconds until so much may be taken; 0: now."""
        burst, per_s = max(1.0, self.rate.burst / self.parts), self.rate.per_s / self.parts
        self.level = min(burst, self.level + (now_s - self.at_s) * per_s)
        self.at_s = now_s
        return max(0.0, (min(cost, burst) - self.level) / per_s)


@dataclass(slots=True)
class _Key:
    """One key's requests at this replica.

    held: let in and not ended. asking: in calls under way. left: of each bucket, when Redis last
    said.
    away_s: since when Redis is away; None: it answers. steady_until_s: until then no more may be
    held than `most`. blocked_until_s: until then all are refused, by `blocked`.
    """

    rules: KeyRules
    held: int = 0
    asking: int = 0
    replicas: int = 1
    left: dict[str, int] = field(default_factory=dict)
    mean_output: float = MEAN_OUTPUT_TOKENS
    away_s: float | None = None
    most: int = 0
    steady_until_s: float = 0.0
    alone: dict[str, _Alone] = field(default_factory=dict)
    blocked: str = ""
    blocked_until_s: float = 0.0


class Asking:
    """Requests of one look-up that are to be let in, and the call that asks for that."""

    def __init__(self, limiter: Limiter, some: Sequence[RouteRequest], call: Call[list[Admitted]]):
        self.call = call
        self._limiter, self._some = limiter, some

    def told(self, reply: object) -> None:
        """Take the reply of Redis; without one, all requests are left to `Limiter.let_in`."""
        self._limiter.told_of(self._some, reply if isinstance(reply, list) else None)


class Limiter:
    """Lets requests in, and settles them when they have ended. One for all namespaces of a
    replica."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._process = random_hex(4)
        self._number = 0
        self._keys: dict[str, _Key] = {}
        self._unsettled: dict[str, AdmitRow] = {}
        """Row of each key that settles what its ended requests have used."""
        self._renewed_s = 0.0
        self._is_away = False
        self._told_of: Sequence[str] = ()
        self._held = 0

    def check(self, spending: Spending) -> None:
        """Refuse a request that Redis would refuse as it did those just before. Raises
        RateLimited."""
        key, now_s = self._keys.get(spending.rules.name), time.monotonic()
        if key is not None and key.blocked_until_s > now_s:
            spending.refused = self._refusal(key, key.blocked, key.blocked_until_s - now_s)
            raise spending.refused

    def asking(self, some: Sequence[RouteRequest]) -> Asking:
        """Returns the call to send with the look-up of these, which are limited and not let in."""
        rows = []
        for request in some:
            spending = request.spending
            assert spending is not None
            key = self._key(spending.rules)
            spending.tokens = request.isl_tokens + self._output(request, key)
            rows.append(
                admission.row_of(
                    *(key.rules, key.held + key.asking),
                    asks=True,
                    requests=1,
                    tokens=spending.tokens,
                    uncached=request.isl_tokens,
                )
            )
        for request in some:
            assert request.spending is not None
            self._key(request.spending.rules).asking += 1
        return Asking(self, some, self._call(rows))

    def told_of(self, some: Sequence[RouteRequest], reply: list[Admitted] | None) -> None:
        """Note which requests Redis lets in; None: it has not said."""
        now_s = time.monotonic()
        for at, request in enumerate(some):
            spending = request.spending
            assert spending is not None
            key = self._key(spending.rules)
            key.asking -= 1
            if reply is None:
                self._is_lost(key, now_s)
                continue
            one = reply[at]
            key.left = {"requests": one.requests, "tokens": one.tokens}
            key.replicas = one.replicas or key.replicas
            if key.away_s is not None:
                key.away_s, key.steady_until_s, key.alone = None, now_s + SETTLED_S, {}
            if one.refused:
                self._refuse(key, spending, one.refused, one.number / 1000, now_s)
            else:
                spending.uncached = one.number
                self._let_in(key, spending)
                if now_s < key.steady_until_s and key.held > key.most and key.rules.concurrent:
                    # Redis may have lost what another replica holds.
                    self.ended(spending)
                    spending.refused = self._refusal(key, "concurrent", SETTLED_S)

    def let_in(self, request: RouteRequest) -> None:
        """Let a request in, or refuse it, that Redis has not decided: by this replica's part of
        what its key may use."""
        spending, now_s = request.spending, time.monotonic()
        assert spending is not None
        if spending.is_let_in or spending.refused is not None:
            return
        key = self._key(spending.rules)
        away_s = now_s - self._is_lost(key, now_s)
        parts = max(one.replicas for one in self._keys.values())
        tokens = request.isl_tokens + self._output(request, key)
        costs = {"requests": 1, "tokens": tokens, "uncached": request.isl_tokens}
        if key.rules.concurrent:
            # By then nothing counts any more that other replicas held when Redis was lost.
            most = key.most if away_s < LEASE_S else max(1, key.rules.concurrent // parts)
            if key.held >= most:
                self._refuse(key, spending, "concurrent", 1.0, now_s)
                return
        buckets = {
            name: key.alone.setdefault(name, self._part(key, name, rate, parts, now_s))
            for name in costs
            if (rate := getattr(key.rules, name)) is not None
        }
        waits = {name: bucket.wait_s(costs[name], now_s) for name, bucket in buckets.items()}
        longest = max(waits, key=waits.__getitem__, default="")
        if longest and waits[longest]:
            self._refuse(key, spending, longest, waits[longest], now_s)
            return
        for name, bucket in buckets.items():
            bucket.level -= costs[name]
        spending.is_owed = True
        self._let_in(key, spending)

    def ended(self, spending: Spending, prompt: int = 0, cached: int = 0, output: int = 0) -> None:
        """Settle a request that has ended and used so many tokens: only the first call counts, and
        it may come before the request is let in."""
        if spending.has_ended:
            return
        spending.has_ended = True
        if not spending.is_let_in:
            return
        key = self._key(spending.rules)
        key.held -= 1
        self._held -= 1
        if output:
            key.mean_output += LATELY * (output - key.mean_output)
        owed = spending.is_owed
        taken = (0, 0) if owed else (spending.tokens, spending.uncached)
        row = admission.row_of(
            *(key.rules, 0),
            requests=int(owed),
            tokens=prompt + output - taken[0],
            uncached=prompt - cached - taken[1],
            prompt_tokens=prompt,
            cached_tokens=cached,
        )
        before = self._unsettled.get(row.key)
        self._unsettled[row.key] = row if before is None else admission.together(before, row)

    @property
    def is_due(self) -> bool:
        """Whether there is anything to settle, or to say again, and no call is away."""
        if self._is_away or not (self._unsettled or self._held):
            return False
        return bool(self._unsettled) or self._must_renew

    @property
    def _must_renew(self) -> bool:
        """Whether it is time to say again what is held, and to look who else asks."""
        return time.monotonic() - self._renewed_s >= RENEW_S

    def take(self) -> Call[list[Admitted]] | None:
        """Returns the call to send now, after which `told` must follow. None: nothing is to be
        said."""
        if not self.is_due:
            return None
        self._is_away = True
        settled, self._unsettled = self._unsettled, {}
        asks = admission.SETTLES
        if self._must_renew:
            self._renewed_s, asks = time.monotonic(), admission.LOOKS
            held = {
                name: admission.row_of(key.rules, 0) for name, key in self._keys.items() if key.held
            }
            settled = held | settled
        self._told_of = list(settled)
        rows = [(row, self._keys[name]) for name, row in settled.items()]
        return self._call([row._replace(asks=asks, held=k.held + k.asking) for row, k in rows])

    def told(self, reply: object) -> None:
        """Take the reply of Redis. Without one, what was settled is not said again, as it may have
        counted."""
        self._is_away = False
        for name, one in zip(self._told_of, reply if isinstance(reply, list) else (), strict=False):
            key = self._keys[name]
            key.replicas = one.replicas or key.replicas

    def _call(self, rows: Sequence[AdmitRow]) -> Call[list[Admitted]]:
        self._number += 1
        lease_ms = round(1000 * LEASE_S)
        return admission.admit(self._keyspace, self._process, self._number, rows, lease_ms=lease_ms)

    def _key(self, rules: KeyRules) -> _Key:
        key = self._keys.get(rules.name)
        if key is None:
            key = self._keys[rules.name] = _Key(rules)
        elif key.rules is not rules:
            key.rules, key.blocked_until_s, key.alone = rules, 0.0, {}
        return key

    def _output(self, request: RouteRequest, key: _Key) -> int:
        """Returns tokens of its answer, as it asks for or as answers are."""
        return request.output_tokens if request.output_tokens != 1 else round(key.mean_output)

    def _let_in(self, key: _Key, spending: Spending) -> None:
        spending.is_let_in = True
        spending.left = dict(key.left)
        key.held += 1
        self._held += 1
        if spending.has_ended:  # its client has gone meanwhile
            spending.has_ended = False
            self.ended(spending)

    def _is_lost(self, key: _Key, now_s: float) -> float:
        """Returns since when Redis does not answer."""
        if key.away_s is None:
            key.away_s, key.most = now_s, key.held
        return key.away_s

    def _part(self, key: _Key, name: str, rate: Rate, parts: int, now_s: float) -> _Alone:
        left = key.left.get(name, -1)
        level = rate.burst if left < 0 else min(rate.burst, left)
        return _Alone(rate, parts, level / parts, now_s)

    def _refuse(
        self, key: _Key, spending: Spending, limit: str, after_s: float, now_s: float
    ) -> None:
        spending.refused = self._refusal(key, limit, after_s)
        if limit == "requests":
            key.blocked, key.blocked_until_s = limit, now_s + min(after_s, BLOCKED_S)

    def _refusal(self, key: _Key, limit: str, after_s: float) -> RateLimited:
        return RateLimited(key.rules, limit, after_s, dict(key.left))
