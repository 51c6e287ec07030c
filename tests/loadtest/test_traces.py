"""Two trace formats, read as requests with prompts."""

import numpy as np
import orjson
import pytest

from loadtest.traces import (
    DEMO_TRACE,
    VOCABULARY,
    TraceError,
    pseudo_random_tokens,
    read_trace,
)

OPEN = [
    {"timestamp": 0, "input_length": 600, "output_length": 10, "hash_ids": [0, 1]},
    {"timestamp": 0, "input_length": 1024, "output_length": 20, "hash_ids": [0, 2]},
    {"timestamp": 2999, "input_length": 512, "output_length": 30, "hash_ids": [0]},
]

CLOSED = [
    {"session": 0, "turn": 0, "input_length": 520, "output_length": 5, "keep": 0,
     "hash_ids": [0, 1], "timestamp": 4000},
    {"session": 0, "turn": 1, "input_length": 800, "output_length": 6, "keep": 1,
     "hash_ids": [2, 3], "think_ms": 1500},
    {"session": 1, "turn": 0, "input_length": 256, "output_length": 7, "keep": 0,
     "hash_ids": [0], "timestamp": 1000},
]  # fmt: skip


def written(path, records):
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return path


@pytest.fixture
def open_loop(tmp_path):
    return written(tmp_path / "open.jsonl", OPEN)


@pytest.fixture
def closed_loop(tmp_path):
    return written(tmp_path / "closed.jsonl", CLOSED)


def test_arrivals_of_one_bin_are_spread_evenly_inside_it(open_loop):
    # Bin 0 holds two requests, at 1/4 and 3/4 of 3 s; 2,999 ms is the start of the next bin.
    assert [s.start_s for s in read_trace(open_loop).sessions] == [0.75, 2.25, 4.5]


def test_every_request_of_an_open_loop_trace_is_a_session_of_its_own(open_loop):
    trace = read_trace(open_loop)
    assert trace.name == "open"
    assert [len(s.turns) for s in trace.sessions] == [1, 1, 1]
    assert [s.turns[0].output_tokens for s in trace.sessions] == [10, 20, 30]


def test_prompts_are_as_long_as_recorded_and_equal_where_block_ids_are_equal(open_loop):
    first, second, third = (s.turns[0].prompt() for s in read_trace(open_loop).sessions)
    assert (first.size, second.size, third.size) == (600, 1024, 512)
    assert first.dtype == np.uint32
    assert np.array_equal(first[:512], second[:512])
    assert np.array_equal(third, first[:512])
    assert not np.array_equal(first[512:600], second[512:600])


def test_a_prompt_is_the_same_each_time_and_differs_with_another_seed(open_loop):
    request = read_trace(open_loop).sessions[0].turns[0]
    assert np.array_equal(request.prompt(seed=1), request.prompt(seed=1))
    # Of 600 tokens, each one of 32,000, two seeds share hardly any by chance.
    assert np.count_nonzero(request.prompt(seed=1) == request.prompt(seed=2)) < 5


def test_tokens_fill_the_vocabulary_evenly_and_stay_inside_it(open_loop):
    tokens = np.concatenate([s.turns[0].prompt() for s in read_trace(open_loop).sessions])
    assert tokens.max() < VOCABULARY
    assert abs(tokens.mean() - VOCABULARY / 2) < 0.05 * VOCABULARY


@pytest.mark.parametrize(
    ("seed", "splitmix64"),
    [(1, 0xE220A8397B1DCDAF), (2, 0x6E789E6AA1B965F4), (3, 0x06C45D188009454F)],
)
def test_tokens_are_the_upper_half_of_splitmix64_scaled_to_the_vocabulary(seed, splitmix64):
    # The generator's published outputs from state 0; position 0 of seed n is its n-th.
    tokens = pseudo_random_tokens(np.zeros(1, dtype=np.uint64), seed)
    assert tokens.tolist() == [(splitmix64 >> 32) * 32_000 >> 32]


def test_a_turn_keeps_the_first_blocks_of_the_turn_before(closed_loop):
    first, second = read_trace(closed_loop).sessions[1].turns
    assert first.blocks == (0, 1)
    assert second.blocks == (0, 2, 3)
    assert second.think_s == 1.5
    assert np.array_equal(first.prompt()[:256], second.prompt()[:256])
    assert not np.array_equal(first.prompt()[256:512], second.prompt()[256:512])


def test_tokens_after_the_last_full_block_belong_to_one_request(closed_loop):
    # 520 = 2 * 256 + 8 and 800 = 3 * 256 + 32.
    first, second = read_trace(closed_loop).sessions[1].turns
    assert (first.prompt().size, second.prompt().size) == (520, 800)
    assert not np.array_equal(first.prompt()[512:], second.prompt()[768:776])


def test_lines_of_different_sessions_may_be_interleaved(tmp_path, closed_loop):
    mixed = read_trace(written(tmp_path / "mixed.jsonl", [CLOSED[0], CLOSED[2], CLOSED[1]]))
    blocks = [[turn.blocks for turn in session.turns] for session in mixed.sessions]
    assert blocks == [[turn.blocks for turn in s.turns] for s in read_trace(closed_loop).sessions]


def test_sessions_are_ordered_by_their_start(closed_loop):
    assert [s.start_s for s in read_trace(closed_loop).sessions] == [1.0, 4.0]


def test_a_cut_keeps_what_starts_inside_it_and_counts_time_from_there(open_loop):
    trace = read_trace(open_loop)
    assert [s.start_s for s in trace.cut(start_s=2).sessions] == [0.25, 2.5]
    assert [s.start_s for s in trace.cut(start_s=2, duration_s=2).sessions] == [0.25]


def test_a_cut_by_requests_may_end_inside_a_session(closed_loop):
    trace = read_trace(closed_loop)
    assert trace.num_requests == 3
    assert [len(s.turns) for s in trace.cut(requests=2).sessions] == [1, 1]
    assert trace.cut(requests=9) == trace


def test_twice_the_load_halves_arrival_times_but_not_think_times(closed_loop):
    trace = read_trace(closed_loop).at_load(2)
    assert [s.start_s for s in trace.sessions] == [0.5, 2.0]
    assert trace.sessions[1].turns[1].think_s == 1.5


def test_copies_of_a_session_share_only_blocks_that_other_sessions_share(closed_loop):
    trace = read_trace(closed_loop)
    twice = trace.repeated(2)
    assert twice.num_requests == 2 * trace.num_requests
    assert len({turn.index for s in twice.sessions for turn in s.turns}) == twice.num_requests
    # Block 0 begins both sessions; 1, 2 and 3 belong to one alone.
    long = [[turn.blocks for turn in s.turns] for s in twice.sessions if len(s.turns) == 2]
    far = 1 << 40
    assert sorted(long) == [[(0, 1), (0, 2, 3)], [(0, far + 1), (0, far + 2, far + 3)]]
    assert [s.turns[0].blocks for s in twice.sessions if len(s.turns) == 1] == [(0,), (0,)]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([OPEN[0], OPEN[1] | {"input_length": 0}],
         "bad.jsonl:2: field 'input_length': expected a whole number from 1, found 0"),
        ([OPEN[0] | {"input_length": 10**15}],
         "bad.jsonl:1: field 'input_length': expected at most 16777216, found 1000000000000000"),
        ([CLOSED[0] | {"input_length": 10**15}],
         "bad.jsonl:1: field 'input_length': expected at most 16777216, found 1000000000000000"),
        ([OPEN[0] | {"timestamp": "soon"}],
         "bad.jsonl:1: field 'timestamp': expected a whole number from 0, found 'soon'"),
        ([OPEN[0], OPEN[1] | {"timestamp": 1_795_392_000}],
         "bad.jsonl:2: field 'timestamp': expected at most 1000000000, found 1795392000"),
        ([CLOSED[0] | {"timestamp": 1_795_392_000}],
         "bad.jsonl:1: field 'timestamp': expected at most 1000000000, found 1795392000"),
        ([OPEN[0] | {"priority": "urgent"}],
         "bad.jsonl:1: field 'priority': expected one of high, normal, low, found 'urgent'"),
        ([OPEN[0] | {"hash_ids": [1, None]}],
         "bad.jsonl:1: field 'hash_ids': expected a list of whole numbers from 0 to 1099511627775"),
        ([OPEN[0] | {"hash_ids": [1, 1 << 40]}],
         "bad.jsonl:1: field 'hash_ids': expected a list of whole numbers from 0 to 1099511627775"),
        ([OPEN[0] | {"hash_ids": [1, 2, 3]}],
         "bad.jsonl:1: field 'hash_ids': 3 ids, but the input has 2 blocks"),
        ([CLOSED[0], CLOSED[1] | {"keep": 3}],
         "bad.jsonl:2: field 'keep': 3 blocks, but the turn before has 2"),
        ([CLOSED[0], CLOSED[1] | {"turn": 2}],
         "bad.jsonl:2: field 'turn': expected 1, the session's next turn"),
        ([CLOSED[0] | {"hash_ids": [1, 2, 3]}],
         "bad.jsonl:1: field 'hash_ids': 3 ids, but the input has 2 blocks"),
        ([CLOSED[0], {"session": 0, "turn": 1, "input_length": 600, "output_length": 1,
                      "keep": 1, "hash_ids": []}],
         "bad.jsonl:2: field 'think_ms': expected a whole number from 0, found None"),
        ([], "bad.jsonl: holds no requests"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_with_its_field(tmp_path, records, message):
    with pytest.raises(TraceError) as error:
        read_trace(written(tmp_path / "bad.jsonl", records))
    assert str(error.value) == message


@pytest.mark.parametrize(("line", "problem"), [("{", "not JSON"), ("[1]", "not an object")])
def test_a_line_that_is_not_an_object_is_named(tmp_path, line, problem):
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(TraceError, match=f"bad.jsonl:1: {problem}"):
        read_trace(path)


def test_a_missing_file_is_a_trace_error(tmp_path):
    with pytest.raises(TraceError, match=r"none.jsonl: No such file"):
        read_trace(tmp_path / "none.jsonl")


def test_the_demo_trace_is_thirteen_minutes_of_chat():
    trace = read_trace(DEMO_TRACE)
    assert trace.num_requests == 2400
    assert 780 < trace.sessions[-1].start_s < 802
    assert np.mean([s.turns[0].input_tokens for s in trace.sessions]) == pytest.approx(13758, abs=1)
