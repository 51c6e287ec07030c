"""Events of external engines, and the blocks that the index shows for them."""

import random
from itertools import pairwise

import pytest
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from app.core.errors import InvalidRequest
from app.core.events import Cleared, Removed, Stored
from app.core.keys import Keyspace
from app.core.types import Tier, TierOverlap, WorkerKey
from app.state.connect import connect
from app.state.overlap import match
from app.state.scripts import ScriptRunner
from tests.fake_worker import fake_agent, running
from tests.workers.bridge.holder import CHAIN, SIZE, TOKENS, Holder, announced, chain_of, stored
from workers.agent.ownership import Ownership
from workers.bridge.events import blocks, pending
from workers.bridge.events.blocks import EngineBlocks
from workers.bridge.events.events import AllBlocksCleared, BlockRemoved, BlockStored, folded


def test_a_chain_is_rehashed_from_its_tokens(holder):
    assert holder.after(stored([11, 12, 13])) == TierOverlap(device=3)
    assert holder.after(stored([14], start=3, parent=13)) == TierOverlap(device=4)
    assert holder.after(BlockRemoved([14, 13])) == TierOverlap(device=2)
    assert holder.after(AllBlocksCleared()) == TierOverlap()


@pytest.mark.parametrize(
    ("as_stored", "as_named"), [(-1, 2**64 - 1), (2**64 - 1, -1), (b"\x01" * 32, b"\x01" * 32)]
)
def test_a_hash_is_the_same_signed_unsigned_or_bytes(holder, as_stored, as_named):
    holder.take(stored([as_stored]), stored([7], start=1, parent=as_named))
    assert holder.overlap() == TierOverlap(device=2)
    assert holder.after(BlockRemoved([as_named])) == TierOverlap()


def test_an_engines_block_may_span_several_index_blocks(holder):
    holder.take(stored([11, 12], size=2 * SIZE), stored([13], start=2, parent=12, size=2 * SIZE))
    assert holder.overlap() == TierOverlap(device=6)
    assert holder.after(BlockRemoved([12])) == TierOverlap(device=2)


@pytest.mark.parametrize(
    ("medium", "expected"),
    [
        (None, TierOverlap(device=1)),
        ("GPU", TierOverlap(device=1)),
        ("Cpu_Pinned", TierOverlap(host=1)),
        ("CPU_TIER2", TierOverlap(disk=1)),
        ("external", TierOverlap()),
    ],
)
def test_the_medium_determines_the_tier(holder, medium, expected):
    assert holder.after(stored([11], medium=medium)) == expected
    assert holder.after(BlockRemoved([11], medium)) == TierOverlap()


def test_events_in_a_medium_that_is_not_known_are_left_out_and_counted(holder):
    holder.take(stored([11]), stored([12], start=1, parent=11, medium="tape"))
    assert holder.after(BlockRemoved([11], "tape")) == TierOverlap(device=1)
    assert holder.blocks.num_unknown_media == 2


def test_wide_tokens_keep_chains_apart_and_are_removed_with_them(holder):
    images = [[n, 2, 3, 4] for n in (1 << 32, (1 << 62) + 5)]
    chains = [chain_of([folded(token) for token in tokens]) for tokens in images]
    for name, tokens in zip((21, 22), images, strict=True):
        holder.take(BlockStored([name], None, tokens, SIZE))
    holder.take(BlockRemoved([21]))
    assert [holder.overlap(chain).device for chain in chains] == [0, 1]
    holder.take(BlockRemoved([22]))
    assert holder.overlap(chains[1]) == TierOverlap()


def test_a_removal_that_says_how_many_copies_are_left_is_believed(holder):
    holder.take(stored([11]), stored([11]), stored([11]))
    assert holder.after(BlockRemoved([11], remaining_copy_counts=[1])) == TierOverlap(device=1)
    assert holder.after(BlockRemoved([11], remaining_copy_counts=[0])) == TierOverlap()


@pytest.mark.parametrize(("locality", "num_held"), [("LOCAL", 1), ("Remote", 0)])
def test_remote_blocks_do_not_count_as_held_by_the_worker(holder, locality, num_held):
    holder.take(stored([11]), announced([11], "STORAGE", locality=locality))
    assert holder.after(BlockRemoved([11])) == TierOverlap(disk=num_held)
    holder.take(stored([11]), stored([11], medium="STORAGE", locality=locality))
    holder.take(BlockRemoved([11], "STORAGE", locality=locality), BlockRemoved([11]))
    assert holder.overlap() == TierOverlap(disk=num_held)


def test_a_remote_removal_leaves_the_local_copy(holder):
    holder.take(stored([11], medium="STORAGE"))
    assert holder.after(BlockRemoved([11], "STORAGE", locality="REMOTE")) == TierOverlap(disk=1)


@pytest.mark.parametrize("offload_first", [False, True])
def test_an_offload_is_matched_to_its_block_stored_earlier_or_later(holder, offload_first):
    events = [stored([11, 12]), announced([11, 12])]
    holder.take(*(reversed(events) if offload_first else events))
    assert holder.after(BlockRemoved([11, 12])) == TierOverlap(host=2)
    assert not holder.blocks.is_blind


def test_an_offload_may_use_the_full_digest_of_a_block_stored_under_an_int(holder):
    """vLLM sends 64 bits of a digest as an int; some versions name offloads by the full digest."""
    digests = [bytes([n]) * 24 + (2**64 - n).to_bytes(8, "big") for n in (1, 2, 3)]
    ints = [-1, 2**64 - 2]
    holder.take(stored(ints), announced(digests[:2]), BlockRemoved(ints))
    assert holder.overlap() == TierOverlap(host=2)
    holder.take(stored([digests[2]], start=2, parent=digests[1], medium="CPU"))
    assert holder.overlap() == TierOverlap(host=3)
    assert holder.after(BlockRemoved(digests[:1], "CPU")) == TierOverlap()
    holder.clock.now = 2 * pending.MAX_WAIT_S
    assert not holder.blocks.is_blind


def test_an_int_may_name_a_block_announced_earlier_by_its_full_digest(holder):
    digests = [bytes([n]) * 24 + n.to_bytes(8, "big") for n in (1, 2)]
    holder.take(announced(digests[:1]))
    holder.take(stored(digests[1:], start=1, parent=digests[0], medium="CPU"))
    holder.take(BlockRemoved([2], "CPU"), stored([1]), BlockRemoved([1]))
    assert holder.overlap() == TierOverlap(host=1)
    holder.clock.now = 2 * pending.MAX_WAIT_S
    assert not holder.blocks.is_blind


def test_an_offload_may_be_announced_after_the_block_has_left_the_device(holder):
    holder.take(stored([11]), BlockRemoved([11]), announced([11], "DISK"))
    assert holder.overlap() == TierOverlap(disk=1)


def test_a_limited_number_of_blocks_held_nowhere_is_remembered(holder, monkeypatch):
    monkeypatch.setattr(blocks, "REMEMBERED", 2)
    holder.take(stored([11, 12, 13]), BlockRemoved([13, 12, 11]))
    assert holder.after(announced([12]), announced([11])) == TierOverlap(host=2)
    assert holder.after(announced([13])) == TierOverlap(host=2)


def test_a_block_stored_twice_must_be_removed_twice(holder):
    assert holder.after(stored([11]), stored([11]), BlockRemoved([11])) == TierOverlap(device=1)
    assert holder.after(BlockRemoved([11])) == TierOverlap()
    assert holder.after(BlockRemoved([11]), stored([11])) == TierOverlap(device=1)


def test_a_block_of_an_engine_without_copies_is_removed_once(holder):
    holder.blocks = EngineBlocks(SIZE, announces_copies=False)
    holder.take(stored([11, 12]), stored([11]), announced([11]), announced([11]))
    assert holder.after(BlockRemoved([12, 11])) == TierOverlap(host=1)
    assert holder.after(BlockRemoved([11], "CPU")) == TierOverlap()


def test_each_group_is_counted_separately(holder):
    holder.take(*(stored([11], group_idx=group) for group in (0, 1)))
    holder.take(BlockRemoved([11], group_idx=0), BlockRemoved([11], group_idx=0))
    assert holder.overlap() == TierOverlap(device=1)
    assert holder.after(BlockRemoved([11], group_idx=1)) == TierOverlap()


def test_tokens_under_two_names_are_held_until_both_are_removed(holder):
    assert holder.after(stored([11]), stored([21]), BlockRemoved([11])) == TierOverlap(device=1)
    assert holder.after(BlockRemoved([21])) == TierOverlap()


def test_a_name_reused_for_other_tokens_drops_its_first_block(holder):
    holder.take(stored([11]), BlockStored([11], None, TOKENS[SIZE : 2 * SIZE], SIZE))
    assert holder.overlap() == TierOverlap()
    assert holder.overlap(chain_of(TOKENS[SIZE : 2 * SIZE])) == TierOverlap(device=1)


def test_sliding_windows_and_recurrent_states_do_not_count_as_prefixes(holder):
    holder.take(
        stored([11, 12], group_idx=0, kv_cache_spec_kind="full_attention"),
        stored([11, 12], group_idx=1, kv_cache_spec_kind="sliding_window"),
        BlockRemoved([11, 12], group_idx=0),
    )
    assert holder.overlap() == TierOverlap()
    holder.take(announced([12], group_idx=1), BlockRemoved([11], group_idx=1))
    assert holder.overlap() == TierOverlap()
    assert holder.after(stored([31], kv_cache_spec_kind="mamba")) == TierOverlap()


def test_an_offload_of_a_group_whose_kind_is_not_known_yet_is_left_out(holder):
    whole = stored([11], group_idx=0, kv_cache_spec_kind="full_attention")
    window = replace(whole, group_idx=1, kv_cache_spec_kind="sliding_window")
    offloads = [announced([11], "DISK", group_idx=1), announced([11], group_idx=0)]
    holder.take(*offloads, whole, *offloads, window)
    holder.take(BlockRemoved([11], group_idx=0), BlockRemoved([11], "CPU", group_idx=0))
    assert holder.overlap() == TierOverlap(host=1)
    assert holder.after(BlockRemoved([11], "CPU", group_idx=0)) == TierOverlap()


def test_of_several_groups_of_full_attention_the_first_counts(holder):
    whole = stored([11, 12], group_idx=0, kv_cache_spec_kind="full_attention")
    # All groups name a prefix by the same hash.
    large = stored([12], size=2 * SIZE, group_idx=1, kv_cache_spec_kind="mla_attention")
    assert holder.after(whole, large, replace(large, medium="CPU")) == TierOverlap(device=2)
    assert holder.after(BlockRemoved([11, 12], group_idx=0)) == TierOverlap()


def test_adapter_and_namespace_are_inherited_from_the_parent(holder):
    first = stored([11], lora_name="sql", cache_salt="tenant")
    holder.take(first, stored([12], start=1, parent=11))
    assert holder.overlap(chain_of(TOKENS, "sql", "tenant")) == TierOverlap(device=2)
    assert holder.overlap() == TierOverlap()


@pytest.mark.parametrize(("lora", "salt"), [("sql", None), (None, "tenant")])
def test_a_name_reused_under_another_adapter_or_namespace_drops_its_first_block(holder, lora, salt):
    holder.take(stored([11]), stored([11], lora_name=lora, cache_salt=salt))
    assert holder.overlap(chain_of(TOKENS, lora, salt)) == TierOverlap(device=1)
    assert holder.overlap() == TierOverlap()


def test_blocks_of_an_unnamed_adapter_are_not_taken_for_the_base_models(holder):
    unnamed = stored([11], lora_id=3)
    holder.take(unnamed, stored([12], start=1, parent=11, lora_id=3))
    assert holder.overlap() == TierOverlap()
    holder.take(stored([21], start=0, lora_id=3, lora_name="sql"))
    assert holder.overlap(chain_of(TOKENS, "sql")) == TierOverlap(device=1)
    assert holder.after(stored([31], lora_id=0)) == TierOverlap(device=1)
    assert not holder.blocks.is_blind


def test_a_blocks_extra_keys_are_part_of_its_hash(holder):
    digest = "0123456789abcdef" + "5" * 48
    holder.take(
        stored(
            [11, 12, 13, 14],
            lora_name="sql",
            cache_salt="tenant",
            extra_keys=[("sql", "tenant"), ((digest, -3), "sql"), None, (b"\x01", "my-image")],
        )
    )
    others = [xxh3_64_intdigest(b"\x01"), xxh3_64_intdigest(b"my-image")]
    items = [[], [0x0123456789ABCDEF], [], others]
    tokens = TOKENS[: 4 * SIZE]
    assert holder.overlap(chain_of(tokens, "sql", "tenant", items)) == TierOverlap(device=4)
    assert holder.overlap(chain_of(tokens, "sql", "tenant")) == TierOverlap(device=1)


@pytest.mark.parametrize("lora", [None, "sql", "tenant"])
def test_a_salt_given_only_in_the_roots_extra_keys_is_recognised(holder, lora):
    """vLLM lists the adapter, then images, then, for the first block, the salt."""
    adapter = [lora] if lora else []
    image = [["f" * 64, 2]]
    keys = [[*adapter, *image, "tenant"], adapter or None]
    holder.take(stored([11, 12], lora_name=lora, extra_keys=keys))
    holder.take(stored([13], start=2, parent=12, lora_name=lora, extra_keys=[adapter]))
    items = [[int("f" * 16, 16)], [], []]
    chain = chain_of(TOKENS[: 3 * SIZE], lora, "tenant", items)
    assert holder.overlap(chain) == TierOverlap(device=3)


@pytest.mark.parametrize("lora", [None, "e" * 64])
def test_a_salt_may_look_like_an_images_digest(holder, lora):
    salt, image = "f" * 64, "d" * 64
    adapter = [lora] if lora else []
    keys = [[*adapter, [image, 1], salt], adapter or None]
    holder.take(stored([11, 12], lora_name=lora, extra_keys=keys))
    chain = chain_of(TOKENS[: 2 * SIZE], lora, salt, [[int("d" * 16, 16)], []])
    assert holder.overlap(chain) == TierOverlap(device=2)


@pytest.mark.parametrize(
    ("first", "chain"),
    [
        (
            stored([11, 12, 13], extra_keys=[None, [["f" * 64, -1]], None]),
            chain_of(TOKENS[: 3 * SIZE], items=[[], [int("f" * 16, 16)], []]),
        ),
        (stored([11, 12, 13], cache_salt="tenant"), chain_of(TOKENS, salt="tenant")),
    ],
)
def test_an_offload_with_tokens_but_no_salt_or_extra_keys_is_of_the_same_block(
    holder, first, chain
):
    offloads = [stored([11, 12]), stored([12, 13], start=1, parent=11)]
    holder.take(first, *(replace(event, medium="CPU") for event in offloads))
    assert holder.overlap(chain) == TierOverlap(device=3)
    holder.take(BlockRemoved([13, 12, 11]))
    assert holder.overlap(chain) == TierOverlap(host=3)
    assert holder.overlap().total <= 1
    holder.take(stored([14], start=3, parent=13))
    assert holder.overlap().total <= 1


@pytest.mark.parametrize(
    "identifier",
    ["-123456789abcdef" + "0" * 48, "0123456789abcdef" + "-" * 48, "0x23456789abcdef" + "0" * 48],
)
def test_an_identifier_that_only_looks_like_a_digest_is_hashed_as_a_whole(holder, identifier):
    holder.take(stored([11], extra_keys=[[[identifier, 0]]]))
    chain = chain_of(TOKENS[:SIZE], items=[[xxh3_64_intdigest(identifier.encode())]])
    assert holder.overlap(chain) == TierOverlap(device=1)


def test_a_multimodal_item_counts_for_all_index_blocks_of_an_engines_block(holder):
    event = stored([11, 12], size=2 * SIZE, extra_keys=[None, [["f" * 64, 0]]])
    holder.take(event)
    item = [int("f" * 16, 16)]
    chain = chain_of(TOKENS[: 4 * SIZE], items=[[], [], item, item])
    assert holder.overlap(chain) == TierOverlap(device=4)


def test_the_first_of_each_pair_of_tokens_counts(holder):
    pairs = list(pairwise(TOKENS))[: 2 * SIZE]
    holder.take(BlockStored([11, 12], None, pairs, SIZE))
    assert holder.cache.scan(CHAIN) == TierOverlap(device=2)


@pytest.mark.parametrize(
    "event",
    [
        stored([11], lookahead_token_ids=[[TOKENS[SIZE]]]),
        BlockStored([11], None, list(pairwise(TOKENS))[:SIZE], SIZE),
    ],
)
def test_a_block_that_looks_ahead_is_reused_if_the_next_one_is_held(holder, event):
    assert holder.after(event) == TierOverlap()
    more = stored([12], 1, 11, lookahead_token_ids=[[7]])
    assert holder.after(more) == TierOverlap(device=1)


def test_of_an_engine_that_looks_ahead_the_chain_of_its_own_blocks_has_to_be_whole(holder):
    """Blocks 11 and 21 have the same tokens, and look ahead to others; 12 follows 11."""
    ahead, other = [[TOKENS[SIZE]]], [[7]]
    first = stored([11], lookahead_token_ids=ahead)
    holder.take(
        first,
        stored([12], 1, 11, lookahead_token_ids=other),
        stored([21], lookahead_token_ids=other),
    )
    assert holder.overlap() == TierOverlap(device=1)
    assert holder.after(BlockRemoved([11])) == TierOverlap()
    assert holder.after(first) == TierOverlap(device=1)


def test_an_engine_that_was_thought_to_look_ahead_may_tell_that_it_does_not(holder):
    holder.blocks = EngineBlocks(SIZE, lookahead_blocks=1)
    assert holder.after(stored([11, 12])) == TierOverlap(device=2)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (stored([11], size=SIZE + 2), "block_size: 6 is not a multiple of the index's 4"),
        (BlockStored([11], None, TOKENS, 0), "block_size: 0 is not a multiple"),
        (
            BlockStored([11, 12], None, TOKENS[:5], SIZE),
            "token_ids: 5 tokens are not 2 blocks of 4",
        ),
        (BlockStored([11], None, [1, 2, 3, -1], SIZE), "token_ids: not all are integers"),
        (BlockStored([11], None, [(1, 2), (), (3, 4), (4, 5)], SIZE), "token_ids: neither tokens"),
        (BlockStored([11], None, [1, 2, 3, 4.0], SIZE), "token_ids: neither tokens"),
        (BlockStored([11], None, [1, 2, 3, None], SIZE), "token_ids: neither tokens"),
        (BlockStored([11], None, [1, 2, 3, {}], SIZE), "token_ids: neither tokens"),
        (stored([11], extra_keys=[]), "extra_keys: 0 entries for 1 blocks"),
    ],
)
def test_an_invalid_event_is_refused_and_changes_nothing(holder, event, message):
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        holder.take(event)
    assert holder.after(stored([11]), BlockRemoved([11])) == TierOverlap()


def test_a_clear_is_passed_on(holder):
    assert holder.blocks.take(AllBlocksCleared()) == [Cleared()]


@pytest.mark.parametrize("seed", range(20))
def test_after_offloads_and_removals_in_any_order_the_index_shows_what_is_held(seed):
    """Compares with reference counts by name, tier and group. The same tokens have three names;
    blocks that span one and two index blocks are mixed. Every other engine announces copies."""
    rng = random.Random(seed)
    holder = Holder()
    copies = seed % 2 == 0
    holder.blocks = EngineBlocks(SIZE, announces_copies=copies)
    ownership = Ownership()
    media = {"GPU": Tier.DEVICE, "CPU": Tier.HOST, "DISK": Tier.DISK}
    names = {}
    for base, size in ((10, SIZE), (20, SIZE), (30, 2 * SIZE)):
        for n in range(8 * SIZE // size):
            event = stored([base + n], n, base + n - 1 if n else None, size)
            names[base + n] = event, CHAIN[n * size // SIZE : (n + 1) * size // SIZE]
    for event, _ in names.values():
        holder.take(event, BlockRemoved(event.block_hashes))
    references = {}
    for _ in range(400):
        name, medium, group = rng.choice(list(names)), rng.choice(list(media)), rng.randrange(2)
        key = name, medium, group
        event, _ = names[name]
        if rng.random() < 0.55:
            again = event if medium == "GPU" else announced([name])
            again = replace(again, medium=medium, group_idx=group)
            references[key] = references.get(key, 0) + 1 if copies else 1
            changes = holder.blocks.take(again)
        else:
            references[key] = max(0, references.get(key, 0) - 1)
            changes = holder.blocks.take(BlockRemoved([name], medium, group))
        ownership.apply(changes)
        ownership.check()
        for change in changes:
            assert isinstance(change, Stored | Removed)
            holder.cache.take(change)
        for at, block in enumerate(CHAIN):
            held = {
                media[medium]
                for (name, medium, _), count in references.items()
                if count and block in names[name][1]
            }
            assert holder.cache.tiers_of(block) == held, (seed, at)


async def test_engines_with_their_own_hashes_and_block_sizes_share_an_index(redis_server):
    """One engine has two data-parallel ranks, hashes as bytes and blocks twice as large."""
    keys = Keyspace("external")
    async with connect(redis_server.url) as redis:
        runner = ScriptRunner(redis, 5.0)

        async def publish(key, *events):
            agent = fake_agent(runner, keys, str(key), block_size=SIZE)
            blocks = EngineBlocks(SIZE)
            async with running(agent):
                for event in events:
                    agent.notify(blocks.take(event))
                assert await agent.published()
            return agent

        lora = stored([5], lora_name="sql")
        one = await publish(WorkerKey("small"), stored([1, 2, 3]), lora)
        large = [b"a" * 32, b"b" * 32]
        ranks = [
            await publish(WorkerKey("large", 0), stored(list(large), size=2 * SIZE)),
            await publish(
                WorkerKey("large", 1), stored([large[0]], size=2 * SIZE), announced([large[0]])
            ),
        ]
        (plain, adapted), _ = await match(runner, keys, [CHAIN, chain_of(TOKENS, "sql")], 1)
    assert plain == {
        one.incarnation: TierOverlap(device=3),
        ranks[0].incarnation: TierOverlap(device=4),
        ranks[1].incarnation: TierOverlap(device=2),
    }
    assert adapted == {one.incarnation: TierOverlap(device=1)}
