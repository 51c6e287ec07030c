import asyncio
import threading
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken

from app.tokens import TokenizerThreads, TooManyTokens, Unrenderable, load
from app.tokens import cuts as cuts_module
from app.tokens import encoder as encoder_module
from app.tokens.cuts import MAX_CUT_TOKENS, Cuts, cut_tokens, pieces
from app.tokens.encoder import Encoder
from app.tokens.errors import Abandoned, Allowance
from app.tokens.pool import LARGE


def added(*tokens):
    made = [
        AddedToken(token, special=True, normalized=False) if isinstance(token, str) else token
        for token in tokens
    ]
    return dict(enumerate(made))


def test_special_tokens_are_places_to_cut():
    assert cut_tokens(added("<s>", "</s>"), ()) == {b"<s>": 0, b"</s>": 1}


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<a>", lstrip=True, normalized=False),
        AddedToken("<a>", rstrip=True, normalized=False),
        AddedToken("<a>", single_word=True, normalized=False),
        AddedToken("<a>", normalized=True),
        AddedToken(" <a>", normalized=False),
        AddedToken("\n\n", normalized=False),
        AddedToken("abba", normalized=False),
    ],
    ids=str,
)
def test_a_token_that_its_surroundings_can_hide_or_widen_is_none(token):
    assert cut_tokens(added(token), ()) == {}


@pytest.mark.parametrize("other", ["<s>x", "x<s>", "</<", "a<s"])
def test_a_token_that_another_can_be_found_instead_of_is_none(other):
    assert b"<s>" not in cut_tokens(added("<s>", other), ())


def test_of_many_tokens_those_that_prompts_contain_are_looked_for():
    many = [f"<|reserved_{number}|>" for number in range(300)]
    assert cut_tokens(added(*many, "<s>"), {"<s>"}) == {b"<s>": 300}
    assert len(cut_tokens(added(*many), many)) == MAX_CUT_TOKENS


def test_parts_are_no_shorter_than_is_worth_a_look_up(monkeypatch):
    monkeypatch.setattr(cuts_module, "MIN_PART_BYTES", 4)
    text = b"ab<s>cd</s><s>e<s>"
    both = [(2, b"<s>"), (7, b"</s>"), (11, b"<s>"), (15, b"<s>")]
    assert Cuts([b"<s>", b"</s>"]).of(text) == both
    assert Cuts([b"<s>"]).of(text[:10]) == [(2, b"<s>")]
    assert Cuts([b"<s>"]).of(b"nothing") == []
    assert Cuts([]).of(b"nothing") == []


@pytest.mark.parametrize("at", range(12))
def test_a_token_is_found_wherever_a_search_ends(at, monkeypatch):
    monkeypatch.setattr(cuts_module, "SEARCHED_BYTES", 4)
    text = b"." * at + b"</s>" + b"." * 9
    assert Cuts([b"<s>", b"</s>"]).of(text) == [(at, b"</s>")]


FOLDERS = Path(__file__).parents[1] / "data/door"
WORDS = Path("docs/experiments.md").read_text().split()
KINDS = ("llama", "qwen", "chatml", "parts")
PIECE_BYTES = 8192


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    for module in (cuts_module, encoder_module):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE_BYTES)


def text(size):
    """Of words, and of about that many bytes."""
    one = " ".join(WORDS) + "\n"
    return (one * (size // len(one) + 1))[:size]


def tokenizer(name):
    return tokenizers.Tokenizer.from_file(str(FOLDERS / name / "tokenizer.json"))


@pytest.mark.parametrize("name", KINDS)
def test_the_ids_of_pieces_are_those_of_the_whole(name):
    made = tokenizer(name)
    long = text(int(2.5 * PIECE_BYTES))
    whole = made.encode(long, add_special_tokens=False).ids
    assert Encoder(made, [], 0).encode(long).tolist() == whole
    token = next(iter(made.get_added_tokens_decoder().values())).content
    parts = f"{token}{long}{token}short{token}"
    ids = Encoder(made, [token], 1 << 20).encode(parts).tolist()
    assert ids == made.encode(parts, add_special_tokens=False).ids


def test_pieces_end_at_words_or_else_between_characters():
    for long in (text(30_000), "é" * 20_000, "x" * 30_000):
        made = list(pieces(long.encode()))
        assert "".join(piece for piece, _ in made) == long
        assert all(len(piece.encode()) <= PIECE_BYTES for piece, _ in made)
        assert all(is_cut == (" " in long) for _, is_cut in made[:-1])


@pytest.mark.parametrize("name", KINDS)
def test_a_long_text_that_cannot_be_cut_is_left_to_the_engine(name):
    encoder = Encoder(tokenizer(name), [], 0)
    with pytest.raises(Unrenderable) as refused:
        encoder.encode("é" * PIECE_BYTES)
    assert refused.value.reason == "size"


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("long", [text(8 * PIECE_BYTES), "a" * 8 * PIECE_BYTES])
def test_a_text_with_too_many_tokens_is_not_tokenized_to_its_end(name, long):
    allowance = Allowance(max_tokens=PIECE_BYTES)
    with pytest.raises(TooManyTokens):
        Encoder(tokenizer(name), [], 0).encode(long, allowance=allowance)
    assert allowance.num_tokens < 5 * PIECE_BYTES


def test_a_text_of_more_bytes_than_tokens_can_be_is_not_tokenized_at_all():
    allowance = Allowance(max_tokens=1000)
    with pytest.raises(TooManyTokens, match="at least 13"):
        Encoder(tokenizer("llama"), [], 0).encode("a" * 25_000, allowance=allowance)
    assert allowance.num_tokens == 0


@pytest.mark.parametrize("name", KINDS)
def test_as_many_tokens_as_may_be_are_not_too_many(name):
    made = tokenizer(name)
    token = next(iter(made.get_added_tokens_decoder().values())).content
    for long in (text(2 * PIECE_BYTES), f"{token}a{token}{text(2 * PIECE_BYTES)}{token}b"):
        encoder = Encoder(made, [token], 1 << 20)
        num_tokens = len(encoder.encode(long))
        assert len(encoder.encode(long, allowance=Allowance(num_tokens))) == num_tokens
        with pytest.raises(TooManyTokens):
            encoder.encode(long, allowance=Allowance(num_tokens - 1))


def test_what_nobody_waits_for_ends_with_the_next_piece():
    allowance = Allowance(is_abandoned=True)
    with pytest.raises(Abandoned):
        Encoder(tokenizer("llama"), [], 0).encode(text(4 * PIECE_BYTES), allowance=allowance)
    assert allowance.num_tokens < PIECE_BYTES


async def test_a_caller_that_is_gone_ends_its_tokenizing():
    pool = TokenizerThreads()
    renderer = load(str(FOLDERS / "llama"), pool, 0)
    begun, gate = threading.Event(), threading.Event()
    seen = []

    def call(allowance):
        seen.append(allowance)
        begun.set()
        gate.wait()

    waiting = asyncio.ensure_future(renderer._run(LARGE, 0, "", call))
    await asyncio.to_thread(begun.wait)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    gate.set()
    assert [allowance.is_abandoned for allowance in seen] == [True]
    pool.close()


async def test_large_texts_do_not_keep_others_waiting():
    pool = TokenizerThreads(num_threads=1)
    gate = threading.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(pool.run(LARGE, gate.wait))
        await asyncio.sleep(0)
        assert await pool.run(LARGE - 1, int) == 0
        gate.set()
    pool.close()
