"""Bodies -> prompts -> chains, without a router."""

import struct

import pytest
from pydantic import ValidationError
from starlette.datastructures import QueryParams

from app.core.errors import InvalidRequest
from app.core.hashing import compute_hashes, seed_for
from app.edge import ask
from app.edge.schemas import FindBestWorker, RouteBody, RouteOptions
from app.router import prompt as prompt_module
from app.router.prompt import Prompt

ABCDEFGHIJ = list(b"ABCDEFGHIJ")
PACKED = struct.pack("<10I", *ABCDEFGHIJ)
LOCAL, CHAIN = compute_hashes(ABCDEFGHIJ, 4)
MAX = 100


def body_of(text, max_tokens=MAX):
    body, tokens = ask.parse(RouteBody, text)
    return ask.of_body(body, tokens, max_tokens)


async def test_ten_tokens_are_two_full_blocks_of_four():
    prompt = ask.of_tokens(RouteOptions(), PACKED, MAX)
    assert prompt.num_tokens == 10
    assert await prompt.chain(4) == CHAIN
    assert len(CHAIN) == 2
    assert await prompt.chain(11) == []


async def test_tokens_in_json_and_packed_tokens_give_the_same_chain():
    prompt = body_of(b'{"token_ids": [65, 66, 67, 68, 69, 70, 71, 72, 73, 74]}')
    assert (prompt.num_tokens, await prompt.chain(4)) == (10, CHAIN)


async def test_hashes_of_the_client_give_the_same_chain():
    first, second = LOCAL
    text = f'{{"local_hashes": [{first}, "{second:016x}"], "num_tokens": 10}}'
    prompt = body_of(text.encode())
    assert (prompt.num_tokens, await prompt.chain(4)) == (10, CHAIN)
    body, _ = ask.parse(FindBestWorker, text.encode())
    assert await ask.of_hashes(body.local_hashes, body.num_tokens, MAX).chain(4) == CHAIN


async def test_adapter_and_cache_namespace_change_the_chain():
    options = RouteOptions(lora_name="sql", cache_namespace="tenant")
    chain = await ask.of_tokens(options, PACKED, MAX).chain(4)
    assert chain == compute_hashes(ABCDEFGHIJ, 4, seed=seed_for("sql", "tenant"))[1]
    assert chain != CHAIN


async def test_images_change_the_chain_from_the_block_on_that_they_touch():
    text = b'{"token_ids": [65, 66, 67, 68, 69, 70, 71, 72, 73, 74], "mm_hashes": [[], [7]]}'
    first, second = await body_of(text).chain(4)
    assert first == CHAIN[0]
    assert second != CHAIN[1]


@pytest.mark.parametrize("block_size", [3, 5, 11])
async def test_images_need_a_list_for_each_full_block(block_size):
    prompt = Prompt(10, tokens=PACKED, mm_hashes=[[], [7], [], []][: 10 // block_size + 1])
    with pytest.raises(InvalidRequest, match="mm_hashes: got") as refused:
        await prompt.chain(block_size)
    assert refused.value.field == "mm_hashes"


async def test_more_hashes_than_the_prompt_has_full_blocks_are_refused():
    prompt = ask.of_hashes([1, 2, 3], 11, MAX)
    with pytest.raises(
        InvalidRequest, match="3 full blocks of 4 tokens do not fit into num_tokens"
    ):
        await prompt.chain(4)
    assert len(await prompt.chain(3)) == 3


async def test_a_prompt_is_less_than_a_block_longer_than_its_hashes():
    for num_tokens in (8, 11):
        assert len(await ask.of_hashes([1, 2], num_tokens, MAX).chain(4)) == 2
    prompt = ask.of_hashes([1, 2], 12, MAX)
    with pytest.raises(InvalidRequest, match="2 full blocks of 4 tokens do not fill num_tokens 12"):
        await prompt.chain(4)
    lookup = ask.of_hashes([1, 2], 12, MAX, may_be_longer=True)
    assert len(await lookup.chain(4)) == 2


async def test_a_chain_computed_in_parts_is_the_same(monkeypatch):
    tokens = list(range(1003))
    packed = struct.pack("<1003I", *tokens)
    items = [[n % 3] * (n % 2) for n in range(250)]
    local, chain = compute_hashes(tokens, 4)
    given = [
        Prompt(1003, tokens=packed),
        Prompt(1003, tokens=tokens),
        Prompt(1003, local_hashes=list(local)),
        Prompt(1003, tokens=packed, lora_name="sql", mm_hashes=items),
    ]
    whole = [await prompt.chain(4) for prompt in given]
    assert whole[:3] == [chain] * 3
    monkeypatch.setattr(prompt_module, "BLOCKS_AT_ONCE", 100)
    assert [await prompt.chain(4) for prompt in given] == whole
    with pytest.raises(InvalidRequest, match="4011 bytes are not a whole number of u32"):
        await Prompt(1003, tokens=packed[:-1]).chain(4)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (b"{}", "token_ids"),
        (b'{"token_ids": [1], "local_hashes": [1], "num_tokens": 4}', "token_ids"),
        (b'{"token_ids": [1], "num_tokens": 1}', "num_tokens"),
        (b'{"local_hashes": [1]}', "num_tokens"),
        (b'{"local_hashes": [1], "num_tokens": 4, "lora_name": "sql"}', "lora_name"),
        (b'{"local_hashes": [1], "num_tokens": 4, "cache_namespace": "a"}', "cache_namespace"),
        (b'{"local_hashes": [1], "num_tokens": 4, "mm_hashes": []}', "mm_hashes"),
        (b'{"token_ids": []}', "token_ids"),
    ],
)
def test_a_body_without_exactly_one_prompt_is_refused(text, field):
    with pytest.raises(InvalidRequest) as refused:
        body_of(text)
    assert refused.value.field == field


async def test_a_prompt_may_be_as_long_as_permitted_and_no_longer():
    assert ask.of_tokens(RouteOptions(), PACKED, 10).num_tokens == 10
    assert len(await ask.of_hashes([1, 2], 10, 10).chain(4)) == 2
    for too_long in (
        lambda: ask.of_tokens(RouteOptions(), PACKED, 9),
        lambda: ask.of_hashes([], 10, 9),
        lambda: ask.of_tokens(RouteOptions(), b"", 9),
    ):
        with pytest.raises(InvalidRequest, match="1 to 9 are allowed"):
            too_long()


async def test_bytes_that_are_no_whole_tokens_are_refused():
    with pytest.raises(InvalidRequest) as refused:
        await ask.of_tokens(RouteOptions(), PACKED + b"x", MAX).chain(4)
    assert refused.value.field == "token_ids"


def test_options_in_a_query_are_read_as_in_a_body():
    query = QueryParams("exclude=w1&exclude=w2:1&reserve=false&priority=high")
    options = ask.options_in_query(query)
    assert options == RouteOptions(exclude=["w1", "w2:1"], reserve=False, priority="high")


@pytest.mark.parametrize("query", ["colour=red", "priority=urgent", "reserve=perhaps"])
def test_an_option_that_is_none_is_refused(query):
    with pytest.raises(ValidationError):
        ask.options_in_query(QueryParams(query))
