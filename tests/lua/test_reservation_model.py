"""Random sequences of reservation calls, made in Redis and in a plain model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from app.core.loads import Load, Reservation
from app.core.types import Incarnation

REQUESTS = [f"r{i}" for i in range(12)]
MAX_REQUESTS = 3


@dataclass
class HeldReservation:
    worker: Incarnation
    tokens: int
    us: int
    blocks: int
    state: str = "p"
    """p: it prefills; d: it decodes; h: its blocks wait to be fetched."""
    has_source: bool = False


@dataclass
class Model:
    """What the scripts should do, apart from times."""

    totals: dict[Incarnation, int]
    held: dict[str, HeldReservation] = field(default_factory=dict)
    """In the order in which they were reserved."""

    def reserve(self, request_id, held, seen, source=None):
        self.release(request_id)
        if source is not None:
            self.held.pop(f"{request_id} source", None)
        pair = [held] if source is None else [held, source]
        for one in pair:
            on_it = [h for h in self.held.values() if h.worker == one.worker and h.state != "h"]
            if one.tokens and len(on_it) >= MAX_REQUESTS:
                return "full"
            if one is held and seen is not None and seen != self.totals[one.worker]:
                return "changed"
        if source is not None:
            self.held[f"{request_id} source"] = source
        held.has_source = source is not None
        self.held[request_id] = held
        for one in pair:
            self.totals[one.worker] += 1
        return "made"

    def prefill_complete(self, request_id):
        if request_id in self.held:
            if self.held[request_id].has_source:
                self.held.pop(f"{request_id} source", None)
            self.held[request_id].state = "d"
            self.held[request_id].has_source = False
        return request_id in self.held

    def source_complete(self, request_id):
        source = self.held.get(f"{request_id} source")
        if source is not None:
            source.state = "h"
        return source is not None

    def release(self, request_id):
        source = self.held.get(f"{request_id} source")
        target = self.held.get(request_id)
        if target and target.has_source and source and (source.state == "p" or not source.tokens):
            del self.held[f"{request_id} source"]
        return self.held.pop(request_id, None) is not None

    def retire(self, inc):
        """Its requests end, each with what its source has promised, unless that is computed."""
        for request_id in [i for i, held in self.held.items() if held.worker == inc]:
            if request_id in self.held:
                self.release(request_id)
        del self.totals[inc]

    def resync(self, old, new):
        """The same process goes on, and so do its requests."""
        self.totals[new] = self.totals.pop(old)
        for held in self.held.values():
            held.worker = new if held.worker == old else held.worker

    def loads(self):
        return {inc: self._load(inc) for inc in self.totals}

    def _load(self, inc):
        held = [h for h in self.held.values() if h.worker == inc]
        prefilling = [h for h in held if h.state == "p"]
        decoding = [h for h in held if h.state == "d"]
        return Load(
            prefill_tokens=sum(h.tokens for h in prefilling),
            prefill_us=sum(h.us for h in prefilling),
            head_us=prefilling[0].us if prefilling else 0,
            blocks=sum(h.blocks for h in held),
            requests=len(prefilling) + len(decoding),
            decoding=len(decoding),
            total=self.totals[inc],
        )


def some_of(inc, rng):
    us = rng.choice((0, rng.randrange(100_000)))
    return HeldReservation(inc, rng.randrange(1, 1000), us, rng.randrange(1, 50))


def wish(source):
    there = {"incarnation": source.worker, "max_requests": MAX_REQUESTS}
    return Reservation("", source.tokens, source.us, source.blocks, **there)


async def step(space, model, rng):
    """One random call, with the same outcome in Redis as in the model."""
    request_id = rng.choice(REQUESTS)
    calls = ["reserve"] * 8 + ["prefill_complete"] * 4 + ["source_complete"] * 2
    calls += ["release", "whole", "expire"] * 2 + ["stop", "lapse", "restart", "resync"]
    match rng.choice(calls):
        case "reserve":
            inc, other = rng.sample(list(model.totals), 2)
            held = some_of(inc, rng)
            source = rng.choice([None, some_of(other, rng), HeldReservation(other, 0, 0, 9, "h")])
            seen = rng.choice([None, None, model.totals[inc], model.totals[inc] - 1])
            if seen == -1:
                seen = None
            refused = await space.reserve(
                inc,
                request_id,
                tokens=held.tokens,
                us=held.us,
                blocks=held.blocks,
                max_requests=MAX_REQUESTS,
                seen_total=seen,
                source=source and wish(source),
            )
            outcome = refused.reason if refused else "made"
            assert outcome == model.reserve(request_id, held, seen, source)
        case "prefill_complete":
            expected = model.prefill_complete(request_id)
            assert await space.prefill_complete(request_id) == expected
        case "source_complete":
            expected = model.source_complete(request_id)
            assert await space.prefill_complete(request_id, of_source=True) == expected
        case "release":
            assert await space.release(request_id) == model.release(request_id)
        case "whole":
            model.prefill_complete(request_id)
            assert await space.release(request_id, whole=True) == model.release(request_id)
        case "expire":
            await space.backdate_expiry(request_id)
            assert await space.expire() == model.release(request_id)
        case "stop" | "lapse" | "restart" as how:
            inc = rng.choice(list(model.totals))
            await ended(space, inc, how)
            model.retire(inc)
            model.totals[await space.worker(name_of(space, inc))] = 0
        case "resync":
            inc = rng.choice(list(model.totals))
            name = name_of(space, inc)
            new = (await space.register(name, resync=True)).incarnation
            assert await space.activate(name, new)
            model.resync(inc, new)


async def ended(space, inc, how):
    """restart: another process takes its place, which happens when that registers."""
    if how == "stop":
        assert await space.retire(name_of(space, inc), inc)
    elif how == "lapse":
        await space.redis.zadd(space.keys["leases"], {str(inc): 1})
        assert await space.retire_lapsed() == 1


def name_of(space, inc):
    return space.infos[inc].key.worker_id


async def loads(space):
    """The loads in Redis, except for the times at which their heads began."""
    found = (await space.loads()).loads
    return {inc: replace(load, head_since_ms=0) for inc, load in found.items()}


async def reserved(space):
    return {key.decode() for key in await space.redis.hkeys(space.keys["reservations"])}


@pytest.mark.parametrize("seed", range(3))
async def test_counters_equal_those_of_a_plain_model_after_every_step(space, seed):
    rng = random.Random(seed)
    model = Model({await space.worker(f"w{i}"): 0 for i in range(3)})
    for _ in range(300):
        await step(space, model, rng)
        assert await loads(space) == model.loads()
        assert await reserved(space) == set(model.held)
    for request_id in list(model.held):
        assert await space.release(request_id)
    idle = {inc: Load(total=total) for inc, total in model.totals.items()}
    assert await loads(space) == idle
    assert await space.redis.keys(space.keys["requests:"] + "*") == []
    assert await space.redis.keys(space.keys["prefills:"] + "*") == []
    assert not await space.redis.exists(space.keys["reservations"], space.keys["expiry"])
