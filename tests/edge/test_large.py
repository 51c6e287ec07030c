"""Bodies read in pieces: as when read at once, and without keeping others waiting."""

import asyncio
import time

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from app.core.errors import InvalidRequest
from app.core.hashing import token_bytes
from app.edge import large
from app.edge.large import BodyReader
from app.edge.schemas import MAX_EXCLUDED, RouteBody
from app.http import numbers as json_numbers
from tests.attack.hostile_bodies import BLOCK_SIZE, MAX_TOKENS, REFUSED, hostile_bodies
from tests.edge.test_bodies import bodies

ACCEPTED = {name: body for name, body in hostile_bodies(400_000) if name not in REFUSED}


@pytest.fixture(scope="module")
def hostile():
    return dict(hostile_bodies(2_000_000))


async def read(raw, max_tokens=MAX_TOKENS):
    return await BodyReader(max_tokens).read(RouteBody, raw, BLOCK_SIZE, "")


def whole(raw):
    """What pydantic makes of a body; None if it refuses it."""
    try:
        body = RouteBody.model_validate_json(raw)
    except ValidationError:
        return None
    tokens = None if body.token_ids is None else token_bytes(body.token_ids)
    return body.model_dump() | {"token_ids": tokens}


async def in_pieces(raw):
    try:
        body, tokens = await BodyReader(MAX_TOKENS).read(RouteBody, raw, 1, "")
    except (ValidationError, InvalidRequest):
        return None
    if tokens is None and body.token_ids is not None:
        tokens = token_bytes(body.token_ids)
    return body.model_dump() | {"token_ids": tokens}


arrays = st.lists(st.integers(-1, 2**64 - 1) | st.just(7), max_size=12)
hexes = st.lists(st.sampled_from(["0123456789abcdef", "FFFFFFFFFFFFFFFF", "x"]), max_size=6)
lists = st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=12)
objects = st.fixed_dictionaries(
    {},
    optional={
        "token_ids": arrays,
        "local_hashes": arrays | hexes,
        "mm_hashes": lists,
        "exclude": st.lists(st.sampled_from(["w1", "w2:0"]), max_size=9),
        "num_tokens": st.integers(0, 99),
    },
)


def written(value, spaced):
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 if spaced else 0)


@given(raw=bodies | st.builds(written, objects, st.booleans()), cut=st.integers(0, 40))
@settings(max_examples=200)
def test_what_is_read_in_pieces_is_what_pydantic_reads(raw, cut):
    """A body of tiny pieces may be refused for what is between its arrays, never misread."""
    for text in (raw, raw[:cut] + raw[cut + 1 :]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(large, "PIECE_BYTES", 24)
            found = asyncio.run(in_pieces(text))
        assert found in (None, whole(text))


@pytest.mark.parametrize("spaced", [False, True])
async def test_a_large_valid_body_is_read_as_pydantic_reads_it(spaced):
    value = {
        "request_id": "a",
        "token_ids": list(range(100_000)),
        "mm_hashes": [[n, 2**64 - 1] if n % 7 == 0 else [] for n in range(50_000)],
        "exclude": [f"worker-{n}" for n in range(MAX_EXCLUDED)],
        "lora_name": '"token_ids": [1, 2] ]] [',
    }
    raw = written(value, spaced)
    assert len(raw) > 500_000
    assert await in_pieces(raw) == whole(raw) is not None
    raw = written({"local_hashes": ["0123456789abcdef", -1, 5] * 10_000, "num_tokens": 3}, spaced)
    assert await in_pieces(raw) == whole(raw) is not None


@pytest.mark.parametrize("name", sorted(REFUSED))
async def test_hostile_bodies_are_refused_and_hold_the_loop_for_one_piece_at_most(hostile, name):
    with pytest.raises((InvalidRequest, ValidationError)) as refused:
        await read(hostile[name])
    assert REFUSED[name] in str(refused.value)


@pytest.mark.parametrize("name", sorted(ACCEPTED))
async def test_other_tasks_run_while_a_large_body_is_read(name):
    raw = ACCEPTED[name]
    turns = 0

    async def count_turns():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    await read(raw)
    counting.cancel()
    assert turns >= len(raw) // large.PIECE_BYTES


async def test_large_bodies_are_read_one_after_another():
    reader = BodyReader(MAX_TOKENS)
    raw = ACCEPTED["tokens"]
    done = []

    async def one(number):
        await reader.read(RouteBody, raw, BLOCK_SIZE, "")
        done.append(number)

    first = asyncio.create_task(one(0))
    await asyncio.sleep(0)
    await asyncio.gather(one(1), one(2))
    await first
    assert done == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        (lambda tokens: [*tokens[:70_000], -1, *tokens], "token_ids.70000", "got -1"),
        (lambda tokens: [*tokens[:70_000], 1.5, *tokens], "token_ids.70000", "got 1.5"),
        (lambda tokens: [*tokens, [1]], "body", "Invalid JSON"),
    ],
)
async def test_a_bad_item_is_named_by_its_place_in_the_whole(change, field, message):
    with pytest.raises((InvalidRequest, ValidationError), match=message) as refused:
        await read(orjson.dumps({"token_ids": change([7] * 80_000)}))
    if isinstance(refused.value, InvalidRequest):
        assert refused.value.field == field


@pytest.mark.parametrize("text", [b"%b,", b",%b", b"%b,,%b", b"%b 1", b"%b, ,%b"])
async def test_a_comma_without_an_item_is_refused_wherever_it_is(text):
    numbers = b",".join([b"7"] * 60_000)
    content = text.replace(b"%b", numbers)
    with pytest.raises(InvalidRequest) as refused:
        await read(b'{"token_ids":[%b]}' % content)
    assert refused.value.field == "body"


async def test_a_prompt_longer_than_any_is_refused_before_its_tokens_are_read(monkeypatch):
    monkeypatch.setattr(large, "_tokens", None)
    raw = orjson.dumps({"token_ids": [7] * 80_000})
    with pytest.raises(InvalidRequest, match="token_ids: over 79999 items") as refused:
        await read(raw, max_tokens=79_999)
    assert refused.value.field == "token_ids"


async def test_without_simdjson_large_bodies_are_read_the_same(monkeypatch):
    fast = await read(ACCEPTED["tokens"])
    monkeypatch.setattr(json_numbers, "simdjson", None)
    assert await read(ACCEPTED["tokens"]) == fast


def test_refusing_the_worst_body_takes_no_longer_than_a_piece():
    """A second for what took eleven."""
    for name, raw in hostile_bodies(8 * 1024 * 1024):
        if name in REFUSED:
            begin = time.process_time()
            with pytest.raises((InvalidRequest, ValidationError)):
                asyncio.run(read(raw))
            assert time.process_time() - begin < 1.0, name
