"""Chains that need not be hashed again: the same as those that are."""

import random
import struct

import numpy as np
import pytest

from app.core.hashing import compute_hashes, compute_local_hashes, seed_for
from app.router import prompt as prompt_module
from app.router.prompt import KnownChains, Prompt, marked

BLOCK = 4
MARK = prompt_module.BLOCKS_PER_MARK


def packed(tokens):
    return struct.pack(f"<{len(tokens)}I", *tokens)


async def test_chains_are_those_that_are_hashed_from_the_start():
    rng, known, prompts = random.Random(3), KnownChains(), [[7] * 200]
    for _ in range(300):
        parent = rng.choice(prompts)
        child = parent[: rng.randint(1, len(parent))]
        child = child + [rng.randrange(3) for _ in range(rng.randint(0, 400))]
        prompts.append(child)
        block_size, lora = rng.choice([(4, None), (8, None), (4, "sql")])
        given = rng.choice([packed(child), np.array(child, np.uint32), np.array(child, np.int64)])
        chain = await Prompt(len(child), given, lora_name=lora).chain(block_size, known)
        assert chain == compute_hashes(child, block_size, seed=seed_for(lora))[1]


@pytest.mark.parametrize("at_once", [20, 8192])
async def test_only_what_follows_a_known_prefix_is_hashed(monkeypatch, at_once):
    monkeypatch.setattr(prompt_module, "BLOCKS_AT_ONCE", at_once)
    known, first = KnownChains(), list(range(BLOCK * (3 * MARK + 5)))
    await Prompt(len(first), packed(first)).chain(BLOCK, known)
    hashed = []

    def count(tokens, *args, **options):
        hashed.append(len(tokens) // (4 * BLOCK))
        return compute_local_hashes(tokens, *args, **options)

    monkeypatch.setattr(prompt_module, "compute_local_hashes", count)
    longer = first + [1] * (BLOCK * 10)
    chain = await Prompt(len(longer), packed(longer)).chain(BLOCK, known)
    assert chain == compute_hashes(longer, BLOCK)[1]
    assert sum(hashed) == 5 + 10


async def test_a_colliding_digest_gives_nobody_the_chain_of_another(monkeypatch):
    class Colliding:
        def __init__(self, seed): ...

        def update(self, data): ...

        def intdigest(self):
            return 1

    monkeypatch.setattr(prompt_module, "xxh3_64", Colliding)
    known = KnownChains()
    for tokens in (list(range(BLOCK * MARK)), list(range(1, BLOCK * MARK + 1))):
        chain = await Prompt(len(tokens), packed(tokens)).chain(BLOCK, known)
        assert chain == compute_hashes(tokens, BLOCK)[1]


async def test_what_is_kept_is_bounded_and_the_latest_used_stays(monkeypatch):
    one = 4 * BLOCK * MARK + prompt_module.BYTES_PER_HASH * MARK
    monkeypatch.setattr(prompt_module, "MAX_BYTES", 10 * one)
    known = KnownChains()

    async def is_known(first):
        raw = packed([first] * (BLOCK * MARK))
        found = bool(known.prefix(marked(raw, BLOCK, seed_for())))
        await Prompt(BLOCK * MARK, raw).chain(BLOCK, known)
        return found

    assert not await is_known(0)
    for other in range(1, 30):
        assert not await is_known(other)
        assert await is_known(0)
    assert [await is_known(other) for other in range(21, 30)] == [True] * 9
    assert not await is_known(1)


async def test_a_prompt_that_would_displace_all_others_is_not_kept(monkeypatch):
    monkeypatch.setattr(prompt_module, "MAX_BYTES", 8000)
    known, tokens = KnownChains(), list(range(BLOCK * MARK))
    raw = packed(tokens)
    await Prompt(len(tokens), raw).chain(BLOCK, known)
    assert known.prefix(marked(raw, BLOCK, seed_for())) == []
