"""Random sequences of reservation calls, made in Redis and in a plain model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from app.core.loads import Load
from app.core.types import Incarnation
from tests.lua.conftest import Namespace

REQUESTS = [f"r{i}" for i in range(12)]
MAX_REQUESTS = 3


@dataclass
class Held:
    worker: Incarnation
    tokens: int
    us: int
    blocks: int
    decoding: bool = False


@dataclass
class Model:
    """What the scripts should do, apart from times."""

    totals: dict[Incarnation, int]
    held: dict[str, Held] = field(default_factory=dict)
    """In the order in which they were reserved."""

    def reserve(self, inc: Incarnation, request_id: str, held: Held, seen: int | None) -> str:
        self.held.pop(request_id, None)
        if sum(h.worker == inc for h in self.held.values()) >= MAX_REQUESTS:
            return "full"
        if seen is not None and seen != self.totals[inc]:
            return "changed"
        self.held[request_id] = held
        self.totals[inc] += 1
        return "made"

    def prefill_complete(self, request_id: str) -> bool:
        if request_id in self.held:
            self.held[request_id].decoding = True
        return request_id in self.held

    def release(self, request_id: str) -> bool:
        return self.held.pop(request_id, None) is not None

    def loads(self) -> dict[Incarnation, Load]:
        return {inc: self._load(inc) for inc in self.totals}

    def _load(self, inc: Incarnation) -> Load:
        held = [h for h in self.held.values() if h.worker == inc]
        prefilling = [h for h in held if not h.decoding]
        return Load(
            prefill_tokens=sum(h.tokens for h in prefilling),
            prefill_us=sum(h.us for h in prefilling),
            head_us=prefilling[0].us if prefilling else 0,
            blocks=sum(h.blocks for h in held),
            requests=len(held),
            decoding=len(held) - len(prefilling),
            total=self.totals[inc],
        )


async def step(space: Namespace, model: Model, rng: random.Random) -> None:
    """One random call, with the same outcome in Redis as in the model."""
    request_id = rng.choice(REQUESTS)
    match rng.choice(
        ["reserve"] * 4 + ["prefill_complete", "prefill_complete", "release", "expire"]
    ):
        case "reserve":
            inc = rng.choice(list(model.totals))
            us = rng.choice((0, rng.randrange(100_000)))
            held = Held(inc, rng.randrange(1000), us, rng.randrange(1, 50))
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
            )
            outcome = refused.reason if refused else "made"
            assert outcome == model.reserve(inc, request_id, held, seen)
        case "prefill_complete":
            expected = model.prefill_complete(request_id)
            assert await space.prefill_complete(request_id) == expected
        case "release":
            assert await space.release(request_id) == model.release(request_id)
        case "expire":
            await space.backdate_expiry(request_id)
            assert await space.expire() == model.release(request_id)


async def loads(space: Namespace) -> dict[Incarnation, Load]:
    """The loads in Redis, except for the times at which their heads began."""
    found = (await space.loads()).loads
    return {inc: replace(load, head_since_ms=0) for inc, load in found.items()}


@pytest.mark.parametrize("seed", range(3))
async def test_counters_equal_those_of_a_plain_model_after_every_step(
    space: Namespace, seed: int
) -> None:
    rng = random.Random(seed)
    model = Model({await space.worker(f"w{i}"): 0 for i in range(3)})
    for _ in range(300):
        await step(space, model, rng)
        assert await loads(space) == model.loads()
    for request_id in list(model.held):
        assert await space.release(request_id)
    idle = {inc: Load(total=total) for inc, total in model.totals.items()}
    assert await loads(space) == idle
    assert await space.redis.keys(space.keys["requests:"] + "*") == []
    assert await space.redis.keys(space.keys["prefills:"] + "*") == []
    assert not await space.redis.exists(space.keys["reservations"], space.keys["expiry"])
