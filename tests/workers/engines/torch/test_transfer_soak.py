"""Many requests at once that go on from each other's KV, over links of which some are bad."""

import asyncio
import random
from contextlib import nullcontext

import pytest

from app.core.hashing import token_bytes
from app.core.types import Tier
from tests.workers.engines.torch.test_engine import output_of
from tests.workers.engines.torch.test_soak import CheckedSpy, prompts_of
from tests.workers.engines.torch.test_transfer import all_let_go, linked, over
from tests.workers.kv.bad_link import cut, flipped
from workers.engines.torch.admission import AdaptiveAdmission
from workers.kv import memory

LEASE_S = 0.3
NUM_CLIENTS = 8
"""Together they need more slots than there are."""


async def kept_by(source, prompt, name, held):
    if held:
        return await source.engine.hand_on(token_bytes(list(prompt)), LEASE_S)
    generation = source.submit(name, prompt, 1, keep_s=LEASE_S)
    await output_of(generation)
    return generation.kept


async def run_client(source, target, prompts, rng):
    name = f"{rng.random()}"
    for _ in range(10):
        prompt = rng.choice(prompts)
        kept = await kept_by(source, prompt, name, held=rng.random() < 0.3)
        if kept is None:
            continue
        alter = rng.choice(
            (None, None, None, flipped(rng.randrange(9000)), cut(rng.randrange(9000)))
        )
        async with over(alter, kept) if alter else nullcontext(kept) as link:
            generation = target.submit(name, prompt, rng.randint(1, 4), source=link)
            try:
                async with asyncio.timeout(rng.choice((0.0, 0.005, 0.02, 60, 60, 60))):
                    await output_of(generation)
            except TimeoutError:
                pass
            finally:
                generation.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("begins_early", [False, True])
@pytest.mark.parametrize("seed", range(2))
async def test_logits_stay_exact_and_no_slot_leaks_whatever_arrives(
    tmp_path, seed, begins_early, monkeypatch
):
    monkeypatch.setattr(memory, "GROUP_BYTES", 1)
    if begins_early:
        monkeypatch.setattr(AdaptiveAdmission, "compute_s", lambda *_: 1e9)
    rng = random.Random(seed)
    prompts = prompts_of(rng)
    spies = CheckedSpy(prompts), CheckedSpy(prompts)
    # Each is a source for the other: from one rank to two, and from two to one.
    async with linked(tmp_path, spies=spies, tp_sizes=(1, 1 + seed)) as engines:
        async with asyncio.TaskGroup() as clients:
            for n in range(NUM_CLIENTS):
                order = engines if n % 2 else engines[::-1]
                clients.create_task(run_client(*order, prompts, random.Random(rng.random())))
        for served in engines:
            await all_let_go(served)
            device = served.manager.tiers[Tier.DEVICE]
            assert device.num_free + device.num_idle == device.num_slots
            assert served.engine.block_events()["fetched"] > 0
    assert min(spy.num_compared for spy in spies) > 10
