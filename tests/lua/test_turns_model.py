"""Random requests that come, have turns and give up, in Redis and in a plain model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from app.state.waiting import Ticket
from tests.lua.conftest import ticket

REPLICAS = ("x", "y", "z")
WEIGHTS = {"high:a": 16.0, "normal:a": 1.0, "normal:b": 3.0, "low:c": 1 / 16, "low:d": 1 / 16}
WEIGHTS |= {f"normal:{n}": 1.0 for n in range(5)}
STEPS = 150


def charge(one):
    return int(one.name.split()[1])


def is_picky(one):
    return one.name.endswith("x")


@dataclass
class Model:
    """What the line should be. now: the middle of the last turn. starts: flow -> when, in virtual
    time, its first ticket begins."""

    now: int = 0
    starts: dict[str, int] = field(default_factory=dict)
    queues: dict[str, list[Ticket]] = field(default_factory=dict)

    def wait(self, one):
        self.starts.setdefault(one.flow, self.now)
        queue = self.queues.setdefault(one.flow, [])
        queue.append(one)
        queue.sort(key=lambda t: (t.since_ms, t.name))

    def leave(self, one, had_turn):
        self.queues[one.flow].remove(one)
        if had_turn:
            self.now = max(self.now, self.starts[one.flow] + charge(one) // 2)
            self.starts[one.flow] += charge(one)
        if not self.queues[one.flow]:
            del self.queues[one.flow], self.starts[one.flow]
        if not self.queues:
            self.now = 0

    def turns(self, limit, max_picky):
        starts = dict(self.starts)
        queues = {flow: list(queue) for flow, queue in self.queues.items()}
        begun = []
        found = []
        picky = 0
        while len(found) - picky < limit and any(queues.values()):
            # Of equal tags, as in lua/turns.lua: flows that have begun, then those by name.
            flow = min(
                (flow for flow in queues if queues[flow]),
                key=lambda flow: (
                    starts[flow] + charge(queues[flow][0]),
                    begun.index(flow) if flow in begun else len(begun),
                    flow,
                ),
            )
            one = queues[flow].pop(0)
            starts[flow] += charge(one)
            found.append(one)
            if flow not in begun:
                begun.append(flow)
            if is_picky(one):
                picky += 1
                if picky == max_picky:
                    queues = {
                        flow: [one for one in queue if not is_picky(one)]
                        for flow, queue in queues.items()
                    }
        return found


@pytest.mark.parametrize("picky_share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("seed", range(4))
async def test_turns_equal_those_of_the_model(space, seed, picky_share):
    rng = random.Random(seed)
    model = Model()
    waiting = []
    for number in range(STEPS):
        if not waiting or rng.random() < 0.55:
            flow = rng.choice(list(WEIGHTS))
            one = ticket(
                flow,
                rng.choice(REPLICAS),
                number,
                tokens=rng.choice((16, 100, 5000)),
                weight=WEIGHTS[flow],
                picky=rng.random() < picky_share,
                # A replica may be slow to report it.
                since_ms=number - rng.randrange(3),
            )
            waiting.append(one)
            model.wait(one)
            await space.wait(one.name.split("-")[0], one)
        else:
            # Mostly one of the first few, as several may go at once.
            one = rng.choice(model.turns(4, 4)) if rng.random() < 0.8 else rng.choice(waiting)
            had_turn = rng.random() < 0.7
            waiting.remove(one)
            model.leave(one, had_turn)
            await space.leave(one, had_turn=had_turn)
        limit = rng.choice((1, 4, len(waiting) + 1))
        max_picky = rng.choice((1, 2, 5, 64))
        expected = [t.name for t in model.turns(limit, max_picky)]
        for replica in REPLICAS:
            own = [name for name in expected if name.startswith(f"{replica}-")]
            assert await space.turns(replica, limit, max_picky) == own, number
    for one in waiting:
        await space.leave(one)
    assert await space.contents() == ""


async def test_a_tenant_whose_requests_mostly_give_up_still_gets_its_share(space):
    # Each step has one turn. `flood` asks for ten and `modest` for one; a request that has waited
    # for more than ten steps gives up.
    waiting = []
    served = {"normal:flood": 0, "normal:modest": 0}
    for step in range(100):
        arrived = [
            ticket(flow, "x", 100 * step + n, since_ms=step)
            for n, flow in enumerate(["normal:flood"] * 10 + ["normal:modest"])
        ]
        giving_up = [one for one in waiting if one.since_ms < step - 10]
        waiting = [one for one in waiting if one.since_ms >= step - 10] + arrived
        await space.leave(*giving_up)
        await space.wait("x", *arrived)
        [name] = await space.turns("x", 1)
        one = next(one for one in waiting if one.name == name)
        waiting.remove(one)
        await space.leave(one, had_turn=True)
        served[one.flow] += 1
    assert abs(served["normal:flood"] - served["normal:modest"]) <= 2
