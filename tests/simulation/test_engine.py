import random
from dataclasses import replace

import pytest

from app.core.events import Removed, Stored
from app.core.hashing import compute_hashes
from app.core.types import Tier
from app.simulation.engine import SimEngine
from app.simulation.pool import BlockPool
from app.simulation.profiles import PROFILES, Profile
from app.simulation.steps import PromptTooLargeError, SimRequest

BLOCK_SIZE = 4
# Steps take 1 + max(10, n) + 0.01 per attention pair + 0.001 per token of decode context.
EASY = Profile(
    over_s=1.0,
    a0_s=10.0,
    b0_s=0.0,
    a1_s=0.0,
    b1_s=1.0,
    q_s=0.01,
    c_s=0.001,
    kv_pool_tokens=64,
    max_batch_tokens=8,
    host_s_per_token=0.5,
    max_num_seqs=4,
)
WIDE = replace(EASY, max_batch_tokens=16)
"""Takes whole prompts in a step, and all their blocks at once."""
ABC = tuple(range(100, 110))  # the ten tokens A to J


def engine_of(pool_blocks=16, *, host_blocks=0, profile=EASY, now=lambda: 0.0):
    return SimEngine(
        profile,
        block_size=BLOCK_SIZE,
        kv_pool_tokens=pool_blocks * BLOCK_SIZE,
        host_pool_tokens=host_blocks * BLOCK_SIZE,
        now=now,
    )


def request_of(request_id, prompt, max_tokens=1):
    return SimRequest.from_tokens(request_id, prompt, max_tokens, block_size=BLOCK_SIZE)


def hashes(tokens):
    return tuple(compute_hashes(tokens, BLOCK_SIZE)[1])


def drain(engine):
    """Step until the engine is idle, checking its books after each step."""
    steps = []
    while (step := engine.step()) is not None:
        engine.check()
        steps.append(step)
    return steps


def serve(engine, *requests):
    for request in requests:
        engine.submit(request)
    return drain(engine)


def cached_tokens(steps):
    return {f.request_id: f.cached_tokens for step in steps for f in step.finished}


# Time


def test_a_prompt_is_prefilled_in_chunks_and_then_gets_one_token_a_step():
    steps = serve(engine_of(), request_of("r", ABC, max_tokens=4))

    assert [(s.prefill_tokens, s.decode_seqs) for s in steps] == [
        (8, 0),
        (2, 0),
        (0, 1),
        (0, 1),
        (0, 1),
    ]
    assert [s.attention_pairs for s in steps] == [8 * 4, 2 * (8 + 1), 0, 0, 0]
    assert [s.decode_context_tokens for s in steps] == [0, 0, 11, 12, 13]
    assert [s.duration_s for s in steps] == pytest.approx([11.32, 11.18, 11.011, 11.012, 11.013])
    assert [s.emitted for s in steps] == [[], ["r"], ["r"], ["r"], ["r"]]
    assert [s.first_tokens for s in steps] == [[], ["r"], [], [], []]
    assert [[f.request_id for f in s.finished] for s in steps] == [[], [], [], [], ["r"]]
    assert steps[-1].finished[0].output_tokens == 4


def test_a_full_step_of_a_70b_model_takes_161_ms():
    engine = SimEngine(PROFILES["70b-4xh100"], block_size=16, now=lambda: 0.0)
    engine.submit(SimRequest.from_tokens("r", range(3000), 1, block_size=16))

    step = engine.step()

    # 2 ms + (8.6 ms + 2,048 * 72.3 us, more than 15.8 ms + 2,048 * 41.5 us) + 2,048 * 1,024 * q
    assert step is not None
    assert step.duration_s == pytest.approx(0.002 + 0.0086 + 0.1480704 + 0.0023069, abs=1e-7)


@pytest.mark.parametrize(("prompts", "seconds"), [(1, 0.189), (2, 0.350), (4, 0.651), (8, 1.296)])
def test_prompts_take_what_they_took_in_a_public_run_of_vllm(prompts, seconds):
    engine = SimEngine(PROFILES["70b-4xh100"], block_size=16, now=lambda: 0.0)
    for n in range(prompts):
        engine.submit(SimRequest.from_tokens(str(n), [n] * 2083, 1, block_size=16))

    assert sum(step.duration_s for step in drain(engine)) == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(("sequences", "seconds"), [(1, 0.0178), (8, 0.0188), (32, 0.0214)])
def test_decodes_take_what_they_took_in_a_public_run_of_vllm(sequences, seconds):
    profile = PROFILES["70b-4xh100"]
    step_s = profile.compute_s(sequences, 0, 590 * sequences, sequences)
    assert step_s == pytest.approx(seconds, rel=0.01)


def test_decoding_requests_come_before_prefill_in_a_step():
    engine = engine_of(profile=replace(EASY, a0_s=0.0))
    engine.submit(request_of("first", ABC[:4], max_tokens=4))
    engine.step()
    engine.submit(request_of("second", range(10)))

    step = engine.step()

    assert step is not None
    assert (step.decode_seqs, step.prefill_tokens) == (1, 7)
    assert step.duration_s == pytest.approx(1 + 8 + 0.01 * 7 * 3.5 + 0.001 * 5)


def test_prompts_share_a_step_in_order_of_arrival():
    steps = serve(
        engine_of(), request_of("a", (1, 2, 3)), request_of("b", ABC[:7]), request_of("c", (4, 5))
    )

    assert [s.prefill_tokens for s in steps] == [8, 4]
    assert [s.first_tokens for s in steps] == [["a"], ["b", "c"]]


def test_no_more_sequences_run_than_the_profile_allows():
    engine = engine_of()
    for i in range(5):
        engine.submit(request_of(str(i), (i,), max_tokens=9))

    engine.step()

    assert engine.metrics().request_active_slots == 4
    assert engine.metrics().request_total_slots == 4
    assert engine.metrics().num_requests_waiting == 1


# Reuse


def test_a_prompt_seen_before_is_reused_in_whole_blocks():
    engine = engine_of()
    serve(engine, request_of("first", ABC))

    steps = serve(engine, request_of("second", (*ABC, 7, 8, 9)))

    assert cached_tokens(steps) == {"second": 8}
    assert steps[0].prefill_tokens == 13 - 8


def test_the_last_token_of_a_wholly_cached_prompt_is_computed_again():
    engine = engine_of()
    serve(engine, request_of("first", ABC[:8]))

    steps = serve(engine, request_of("second", ABC[:8]))

    assert cached_tokens(steps) == {"second": 4}
    assert steps[0].prefill_tokens == 4


def test_the_next_turn_of_a_chat_reuses_generated_blocks():
    engine = engine_of()
    turn = request_of("turn 1", ABC, max_tokens=7)
    serve(engine, turn)
    answer = turn.output_tokens(0, 7)

    steps = serve(engine, request_of("turn 2", (*ABC, *answer, 1, 2, 3)))

    # 10 + 7 tokens, of which the last was never computed: 16 tokens, 4 full blocks.
    assert cached_tokens(steps) == {"turn 2": 16}


def test_prompts_admitted_in_one_step_share_their_blocks():
    engine = engine_of()
    for name in ("a", "b"):
        engine.submit(request_of(name, ABC[:5], max_tokens=2))

    step = engine.step()

    # b shares the first block, which a has computed: 2 blocks of a and 1 more of b.
    assert step is not None
    assert step.prefill_tokens == 5 + 1
    assert engine.metrics().kv_active_blocks == 3
    assert engine.metrics().gpu_cache_usage_perc == 3 / 16


def test_blocks_computed_twice_at_the_same_time_are_kept_twice():
    engine = engine_of()
    first = request_of("first", ABC, max_tokens=7)
    tokens = (*ABC, *first.output_tokens(0, 2))  # the third block, half of it generated
    engine.submit(first)
    engine.step()
    engine.step()  # the prompt is complete, one token generated

    engine.submit(request_of("second", (*tokens, 1), max_tokens=5))
    engine.step()  # both compute the third block, one half of it, the other all of it
    engine.check()
    assert engine.metrics().kv_active_blocks == 3 + 1 + 1

    engine.step()
    engine.check()
    assert engine.metrics().kv_active_blocks == 3 + 1 + 1


def test_a_block_computed_after_known_ones_is_published_as_the_child_of_the_last():
    a, b, c = hashes(range(12))
    pool = BlockPool(8, 0, lambda: 0.0)
    assert (pool.acquire((), 2), pool.acquire((), 3)) == (([], 0), ([], 0))
    pool.register((a, b), None)
    pool.register((a, b, c), None)
    assert pool.take_events() == [Stored((a, b), None), Stored((c,), b)]


def test_a_block_is_gone_once_its_last_copy_is():
    a, b, c = hashes(range(12))
    pool = BlockPool(3, 0, lambda: 0.0)
    for _ in range(2):
        pool.acquire((), 1)
        pool.release(pool.register((a,), None), 0)
    assert pool.acquire((), 2) == ([], 0)
    assert (pool.match((a,)), pool.take_events()) == (1, [Stored((a,), None)])
    pool.release(pool.register((b, c), None), 0)
    pool.acquire((), 1)
    assert (pool.match((a,)), pool.take_events()[-1]) == (0, Removed((a,)))


def test_a_chain_may_name_a_block_twice():
    (a,) = hashes(range(4))
    pool = BlockPool(4, 0, lambda: 0.0)
    pool.acquire((), 1)
    pool.release(pool.register((a,), None), 0)
    acquired = pool.acquire((a, a), 2)
    pool.check([acquired.slots], 0)
    pool.release(acquired.slots, 0)
    pool.check([], 0)


def test_the_hit_rate_is_cached_over_all_prompt_tokens():
    engine = engine_of()

    serve(engine, request_of("first", ABC))
    serve(engine, request_of("second", ABC))

    assert engine.metrics().gpu_prefix_cache_hit_rate == 8 / 20


def test_the_hit_rate_forgets_all_but_the_last_thousand_requests():
    engine = engine_of()
    serve(engine, request_of("cold", ABC))

    for i in range(1000):
        serve(engine, request_of(str(i), ABC))

    assert engine.metrics().gpu_prefix_cache_hit_rate == 8 / 10


@pytest.mark.parametrize(("host_blocks", "idle_s"), [(0, [0, 70]), (3, [0, 0, 70])])
def test_idle_before_evict_counts_only_blocks_that_left_their_last_tier(host_blocks, idle_s):
    """Each request takes the whole pool of three blocks, and fills two of them."""
    now_s = 100.0
    engine = engine_of(3, host_blocks=host_blocks, now=lambda: now_s)
    idle_seen = []
    for n, _ in enumerate(idle_s):
        serve(engine, request_of(f"r{n}", range(100 * n, 100 * n + 10)))
        idle_seen.append(engine.metrics().kv_idle_before_evict_s)
        now_s += 70 if host_blocks == 0 else 35

    assert idle_seen == idle_s


# Events


def test_blocks_are_published_once_computed_from_the_root_outward():
    engine = engine_of()
    request = request_of("r", ABC, max_tokens=8)
    a, b, c, d = hashes((*ABC, *request.output_tokens(0, 6)))
    engine.submit(request)

    events_of_step = []
    while engine.step() is not None:
        events_of_step.append(engine.take_events())

    # Step 1 computes A-H; step 2 computes I and J and generates the first of eight tokens. The KV
    # of a token is computed one step after the token: c fills in step 4, and d in step 8.
    assert events_of_step[0] == [Stored((a, b), None)]
    assert events_of_step[3] == [Stored((c,), b)]
    assert events_of_step[7] == [Stored((d,), c)]
    assert [i for i, events in enumerate(events_of_step) if events] == [0, 3, 7]


def test_tails_are_evicted_before_their_parents_and_the_oldest_request_first():
    engine = engine_of(pool_blocks=6, profile=WIDE)
    a1, a2 = hashes(ABC)
    b1, _ = hashes(ABC[2:])
    serve(engine, request_of("a", ABC), request_of("b", ABC[2:]))
    engine.take_events()

    serve(engine, request_of("c", range(13)))  # 4 blocks, and 2 are free

    assert engine.take_events()[0] == Removed((a2, a1))
    serve(engine, request_of("d", range(50, 60)))  # 3 blocks, and 1 is free
    assert engine.take_events()[0] == Removed((hashes(ABC[2:])[1], b1))


def test_recently_used_blocks_are_not_the_next_to_be_evicted():
    engine = engine_of(pool_blocks=6, profile=WIDE)
    serve(engine, request_of("a", ABC), request_of("b", ABC[2:]))
    serve(engine, request_of("a again", ABC))
    engine.take_events()

    serve(engine, request_of("c", range(13)))

    assert engine.take_events()[0] == Removed(hashes(ABC[2:])[::-1])


# Space


def first_steps(steps):
    """In which step, counted from 1, each request got its first token."""
    return {request_id: i + 1 for i, s in enumerate(steps) for request_id in s.first_tokens}


def test_a_request_waits_until_its_prompt_fits_and_is_not_overtaken():
    engine = engine_of(pool_blocks=4)
    engine.submit(request_of("running", ABC[:4], max_tokens=7))  # 2 blocks from its second token on
    engine.submit(request_of("large", range(10), max_tokens=1))  # 3 blocks
    engine.submit(request_of("small", (1,)))  # 1 block

    steps = drain(engine)

    # The first step has 4 tokens of `large`. The next one needs two blocks more for it, and one is
    # left when `running` has taken its own: `large` is preempted until `running` ends in step 7.
    assert [s.preempted for s in steps if s.preempted] == [["large"]]
    assert first_steps(steps) == {"running": 1, "large": 8, "small": 8}


def test_where_no_block_is_left_the_youngest_is_preempted_and_is_the_next_to_be_admitted():
    engine = engine_of(pool_blocks=5)
    for name, first in (("old", 0), ("young", 10), ("next", 20)):
        engine.submit(request_of(name, range(first, first + 4), max_tokens=5))
    engine.submit(request_of("small", (1,)))

    steps = drain(engine)

    # From step 2 on `old` and `young` have two blocks each; `next` has the last one, and needs
    # another in step 3. `small` would fit then, but does not overtake it.
    both = ["old", "young"]
    assert [s.emitted for s in steps[:3]] == [both, [*both, "next"], both]
    assert [s.preempted for s in steps[:4]] == [[], [], ["next"], []]
    assert steps[5].emitted == ["next", "small"]
    assert (steps[5].prefill_tokens, first_steps(steps)["small"]) == (1 + 1, 6)


def test_what_was_generated_is_computed_again_and_each_token_comes_once():
    engine = engine_of(pool_blocks=4)
    engine.submit(request_of("old", ABC[:4], max_tokens=9))
    engine.submit(request_of("young", range(3), max_tokens=9))

    steps = drain(engine)

    # Step 2 takes the third block, for `old`, and step 3 the fourth, for `young`. Step 6 needs a
    # fifth: `young` has generated 5 tokens by then. `old` ends in step 9. In step 10 `young`
    # computes 3 + 5 tokens, of which 4 are still in the cache, and goes on.
    assert [(i + 1, s.preempted) for i, s in enumerate(steps) if s.preempted] == [(6, ["young"])]
    assert steps[9].prefill_tokens == 4
    assert [s.emitted.count("young") for s in steps] == [1] * 5 + [0] * 4 + [1] * 4
    assert first_steps(steps) == {"old": 1, "young": 1}
    assert [f.cached_tokens for f in steps[-1].finished] == [0]
    assert engine.num_preemptions == 1


def test_a_preempted_request_can_be_cancelled():
    engine = engine_of(pool_blocks=4)
    engine.submit(request_of("old", ABC[:4], max_tokens=9))
    engine.submit(request_of("young", range(3), max_tokens=9))
    for _ in range(6):
        engine.step()
    assert engine.metrics().num_requests_waiting == 1

    engine.cancel("young")

    assert [f.request_id for step in drain(engine) for f in step.finished] == ["old"]


def test_a_request_larger_than_the_pool_is_refused_with_both_sizes():
    engine = engine_of(pool_blocks=4)
    serve(engine, request_of("fits", ABC, max_tokens=6))

    with pytest.raises(PromptTooLargeError, match=r"10 prompt \+ 7 output tokens.*holds 16"):
        engine.submit(request_of("r", ABC, max_tokens=7))


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3])
def test_a_cancelled_request_releases_all_that_it_held(steps_before):
    engine = engine_of()
    engine.submit(request_of("r", ABC, max_tokens=4))
    for _ in range(steps_before):  # waiting, half prefilled, prefilled, decoding
        engine.step()

    engine.cancel("r")
    engine.cancel("r")

    engine.check()
    assert engine.step() is None
    metrics = engine.metrics()
    assert (metrics.request_active_slots, metrics.num_requests_waiting) == (0, 0)
    assert metrics.kv_active_blocks == 0
    assert metrics.gpu_cache_usage_perc == 0


def test_blocks_of_a_cancelled_request_are_reused():
    engine = engine_of()
    engine.submit(request_of("first", ABC))
    engine.step()  # 8 of 10 tokens
    engine.cancel("first")

    assert cached_tokens(serve(engine, request_of("second", ABC))) == {"second": 8}


def test_cancelling_leaves_the_blocks_that_others_use():
    engine = engine_of()
    for name in ("a", "b"):
        engine.submit(request_of(name, ABC[:5], max_tokens=2))
    engine.step()

    engine.cancel("a")

    engine.check()
    assert engine.metrics().kv_active_blocks == 2
    assert [f.request_id for step in drain(engine) for f in step.finished] == ["b"]


# Host tier


def test_evicted_blocks_are_published_on_the_host_before_they_leave_the_device():
    engine = engine_of(pool_blocks=4, profile=WIDE, host_blocks=4)
    a, b = hashes(ABC)
    serve(engine, request_of("first", ABC))
    engine.take_events()

    serve(engine, request_of("second", range(13)))

    assert engine.take_events()[:2] == [Stored((a, b), None, Tier.HOST), Removed((b, a))]


def test_host_blocks_are_loaded_back_at_the_hosts_rate():
    engine = engine_of(pool_blocks=4, profile=WIDE, host_blocks=4)
    a, b = hashes(ABC)
    serve(engine, request_of("first", ABC), request_of("second", range(13)))
    engine.take_events()

    steps = serve(engine, request_of("third", ABC))

    assert cached_tokens(steps) == {"third": 8}
    assert [f.host_tokens for step in steps for f in step.finished] == [8]
    assert (steps[0].loaded_tokens, steps[0].prefill_tokens) == (8, 2)
    assert steps[0].load_s == 8 * 0.5
    assert steps[0].duration_s == pytest.approx(8 * 0.5 + 1 + 10 + 0.01 * 2 * (8 + 1))
    assert engine.take_events()[-2:] == [Stored((a, b), None), Removed((a, b), Tier.HOST)]


def test_a_chain_split_between_the_tiers_is_reused_as_a_whole():
    engine = engine_of(pool_blocks=4, profile=WIDE, host_blocks=4)
    _, b, c = hashes(range(12))
    serve(engine, request_of("first", range(12), max_tokens=2))
    serve(engine, request_of("second", range(50, 55)))  # evicts c
    engine.take_events()

    steps = serve(engine, request_of("third", range(13)))

    assert cached_tokens(steps) == {"third": 12}
    assert steps[0].loaded_tokens == 4
    assert engine.take_events()[-2:] == [Stored((c,), b), Removed((c,), Tier.HOST)]


def test_a_full_host_tier_drops_its_oldest_tails():
    engine = engine_of(pool_blocks=4, profile=WIDE, host_blocks=1)
    _, b = hashes(ABC)
    serve(engine, request_of("first", ABC))
    engine.take_events()

    serve(engine, request_of("second", range(13)))

    assert engine.take_events()[2] == Removed((b,), Tier.HOST)
    assert cached_tokens(serve(engine, request_of("third", ABC))) == {"third": 4}


def test_a_block_computed_again_leaves_the_host():
    engine = engine_of(pool_blocks=4, profile=WIDE, host_blocks=4)
    a, b = hashes(ABC[:8])
    serve(engine, request_of("first", ABC[:8]), request_of("second", range(13)))
    engine.take_events()

    serve(engine, request_of("third", ABC[:8]))  # loads a, computes b as its last token is in it

    assert engine.take_events()[-4:] == [
        Stored((a,), None),
        Removed((a,), Tier.HOST),
        Stored((b,), a),
        Removed((b,), Tier.HOST),
    ]


# Input


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (SimRequest("r", (), (), 0, 1), "prompt_tokens 0"),
        (SimRequest("r", (), (1,), 1, 0), "max_tokens 0"),
        (SimRequest("r", hashes(ABC), (1,), 10, 1), "not 10 prompt tokens"),
    ],
)
def test_an_invalid_request_is_refused(request_, message):
    with pytest.raises(ValueError, match=message):
        engine_of().submit(request_)


def test_an_id_in_use_is_refused_until_its_request_has_finished():
    engine = engine_of()
    engine.submit(request_of("r", ABC))

    with pytest.raises(ValueError, match="'r' is already in use"):
        engine.submit(request_of("r", ABC))
    engine.step()
    with pytest.raises(ValueError, match="'r' is already in use"):
        engine.submit(request_of("r", ABC))

    drain(engine)
    engine.submit(request_of("r", ABC))


def test_a_pool_without_a_single_block_is_refused():
    with pytest.raises(ValueError, match="smaller than one block"):
        engine_of(pool_blocks=0)


def test_a_request_has_its_full_blocks_and_the_tokens_after_them():
    request = request_of("r", ABC)

    assert request.blocks == hashes(ABC)
    assert len(request.blocks) == 2
    assert request.tail_tokens == (108, 109)
    assert request.prompt_tokens == 10


def test_output_depends_on_the_prompt_alone():
    output = request_of("r", ABC).output_tokens(0, 5)

    assert request_of("other", ABC).output_tokens(2, 5) == output[2:]
    assert request_of("r", (*ABC[:9], 0)).output_tokens(0, 5) != output
    assert all(0 <= token < 1 << 15 for token in output)
    assert len(set(output)) == 5


# Everything at once


def test_check_detects_a_lost_block():
    engine = engine_of()
    engine.submit(request_of("r", ABC, max_tokens=9))
    engine.step()
    engine.check()

    engine.pool.release(engine.pool._slots[hashes(ABC[:4])[0]], 0)

    with pytest.raises(AssertionError, match="references differ"):
        engine.check()


def replay(held, event):
    match event:
        case Stored():
            path = (*((event.parent,) if event.parent is not None else ()), *event.blocks)
            anywhere = set().union(*held.values())
            assert event.parent is None or path[0] in anywhere, "stored before its parent"
            held[event.tier].update(event.blocks)
        case Removed():
            assert held[event.tier].issuperset(event.blocks), "removed blocks that were not stored"
            held[event.tier].difference_update(event.blocks)
        case _:
            raise AssertionError(f"the simulation makes no {event}")


@pytest.mark.parametrize("seed", range(8))
def test_under_random_work_the_books_balance_and_events_match_the_pool(seed):
    rng = random.Random(seed)
    engine = engine_of(pool_blocks=24, host_blocks=rng.choice([0, 10]))
    held = {Tier.DEVICE: set(), Tier.HOST: set()}
    chats = [[rng.randrange(9)] for _ in range(6)]
    seen = set()
    submitted = {}
    emitted = {}
    cancelled = set()

    for i in range(600):
        if engine.num_waiting < 6 and rng.random() < 0.5:
            chat = rng.choice(chats)
            if len(chat) > 60:
                chat[rng.randrange(1, 20) :] = []
            chat += [rng.randrange(3) for _ in range(rng.randrange(12))]
            request = request_of(str(i), chat, rng.randrange(1, 20))
            chat += request.output_tokens(0, request.max_tokens)
            seen.update(hashes(chat))
            submitted[str(i)] = request.max_tokens
            engine.submit(request)
        if rng.random() < 0.05 and submitted:
            victim = rng.choice(list(submitted))
            cancelled.add(victim)
            engine.cancel(victim)
        step = engine.step()
        engine.check()
        for name in step.emitted if step else ():
            emitted[name] = emitted.get(name, 0) + 1
        for event in engine.take_events():
            replay(held, event)
        on_any_tier = held[Tier.DEVICE] | held[Tier.HOST]
        assert {block for block in seen if engine.pool.match((block,))} == on_any_tier
        assert held[Tier.DEVICE].isdisjoint(held[Tier.HOST])

    for step in drain(engine):
        for name in step.emitted:
            emitted[name] = emitted.get(name, 0) + 1
    complete = submitted.keys() - cancelled
    assert len(complete) > 50
    assert {name: emitted[name] for name in complete} == {
        name: submitted[name] for name in complete
    }
    assert engine.metrics().gpu_prefix_cache_hit_rate > 0.1
    assert engine.metrics().kv_active_blocks == 0


@pytest.mark.parametrize("host_blocks", [0, 8])
def test_quiet_steps_can_be_skipped(host_blocks):
    """Skipping them at once leaves the same engine, after the same time, as taking each step."""
    engines = [engine_of(32, host_blocks=host_blocks) for _ in range(2)]
    for engine in engines:
        engine.submit(request_of("a", ABC, max_tokens=9))
        engine.submit(request_of("b", ABC[:3], max_tokens=40))
    skipping, stepping = engines
    skipped = 0
    while (
        (quiet := skipping.quiet_steps()) > 0
        or skipping.num_waiting
        or skipping.metrics().request_active_slots
    ):
        if quiet < 2:
            assert skipping.step() == stepping.step()
        else:
            seconds = skipping.decode_s(quiet)
            step = skipping.skip(quiet)
            singly = [stepping.step() for _ in range(quiet)]
            assert all(one is not None and not one.finished for one in singly)
            assert sum(one.duration_s for one in singly if one) == pytest.approx(seconds)
            assert step.duration_s == pytest.approx(seconds / quiet)
            skipped += quiet
        skipping.check()
        assert skipping.metrics() == stepping.metrics()
        assert skipping.take_events() == stepping.take_events()
    assert stepping.step() is None
    assert skipped > 5


def test_no_step_is_quiet_while_a_request_waits_or_prefills():
    engine = engine_of(32)
    assert engine.quiet_steps() == 0
    engine.submit(request_of("a", ABC * 2, max_tokens=9))
    engine.step()  # 8 of 20 tokens
    assert engine.quiet_steps() == 0
    engine.step()
    engine.step()
    assert engine.quiet_steps() == 0  # the next token needs a block
    engine.step()
    assert engine.quiet_steps() == 2  # the third token from now fills it
    engine.submit(request_of("b", ABC))
    assert engine.quiet_steps() == 0
