"""A block with the hash of another one, but not its tokens, is served nothing of that one's KV."""

import json
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from app.core.hashing import compute_hashes, token_bytes
from app.core.types import Tier
from tests.eventually import eventually
from tests.workers.engines.torch.test_engine import GREEDY, output_of
from tests.workers.engines.torch.test_loading import SETTINGS, serving
from workers.engines.base import CompletionRequest
from workers.engines.torch.engine import TorchEngine
from workers.kv.identity import hash_of, identities_of

TWINS = json.loads((Path(__file__).parents[3] / "data" / "twin_blocks.json").read_text())
REST = [7 * n % 251 for n in range(50)]
GIVEN, TWIN = ([*TWINS[name], *REST] for name in ("block", "twin"))
WHOLE = 64
"""Tokens of the whole chunks."""


@asynccontextmanager
async def holding(tier, folder):
    """An engine that holds GIVEN in that tier, and in the slower ones."""
    settings = replace(SETTINGS, prefill_chunk=16, write_policy="through")
    settings = replace(settings, disk_folder=str(folder), disk_pool_tokens=1024)
    async with serving(settings) as (engine, publisher):
        assert isinstance(engine, TorchEngine)
        await asked(engine, GIVEN)

        async def tiers():
            return publisher.shown.tiers_of(hash_of(identities_of(token_bytes(GIVEN), 16)[-1]))

        await eventually(tiers, lambda held: held == set(Tier))
        if tier is Tier.HOST:
            await engine._cache._free(Tier.DEVICE, WHOLE)
        if tier is not Tier.DISK:
            yield engine
    if tier is Tier.DISK:
        async with serving(settings) as (engine, _):
            assert isinstance(engine, TorchEngine)
            yield engine


async def asked(engine, prompt, salt=""):
    """What it writes, and how much of the prompt it had from the device, from host and disk."""
    request = CompletionRequest("only", token_bytes(prompt), 6, GREEDY, salt=salt)
    tokens, finished = await output_of(engine.complete(request))
    below = [finished.host_tokens, finished.disk_tokens]
    return tokens, [finished.cached_tokens - sum(below), *below]


def test_the_twin_has_the_hashes_of_the_given_prompt_and_no_identity_of_it():
    given, twin = (identities_of(token_bytes(prompt), 16) for prompt in (GIVEN, TWIN))
    assert compute_hashes(GIVEN, 16) == compute_hashes(TWIN, 16)
    assert [*map(hash_of, given)] == [*map(hash_of, twin)] == compute_hashes(GIVEN, 16)[1]
    assert not {block[:32] for block in given} & {block[:32] for block in twin}


@pytest.mark.parametrize("tier", Tier)
async def test_a_twin_is_computed_where_a_tier_holds_the_given_prompt(tier, tmp_path):
    async with serving(replace(SETTINGS, prefill_chunk=16)) as (alone, _):
        assert isinstance(alone, TorchEngine)
        twins_own, _ = await asked(alone, TWIN)
    async with holding(tier, tmp_path) as engine:
        assert await asked(engine, TWIN) == (twins_own, [0, 0, 0])
        tokens, cached = await asked(engine, GIVEN)
        assert cached == [WHOLE * (tier is at) for at in Tier]
        assert tokens != twins_own
        assert await asked(engine, TWIN) == (twins_own, [WHOLE, 0, 0])
        assert await asked(engine, GIVEN, "red") == (tokens, [0, 0, 0])
        assert await asked(engine, GIVEN, "red") == (tokens, [WHOLE, 0, 0])
        engine.check()
