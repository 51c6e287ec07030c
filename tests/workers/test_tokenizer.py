from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from app.core.errors import ConfigError
from tests.workers.checkpoints import KINDS, TEXT, library
from workers.engines.tokenizer import HALF_CHARACTER, HELD_TOKENS, Tokenizer


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(library(kind))


def streamed(of: Tokenizer, tokens: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    stream = of.stream(context)
    return [*map(stream.push, tokens), stream.end()]


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_back_from_its_tokens(kind: str, tmp_path: Path) -> None:
    library(kind).save(str(tmp_path / "tokenizer.json"))
    read = Tokenizer.from_folder(tmp_path)
    tokens = read.encode(TEXT)
    assert tokens[0] == library(kind).token_to_id("<s>")
    assert read.decode(tokens) == TEXT


def test_a_prompt_is_neither_cut_nor_padded_though_the_file_says_so(tmp_path: Path) -> None:
    asking = Library.from_str(library("bytes").to_str())
    asking.enable_truncation(4)
    asking.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_folder(tmp_path).encode(TEXT)) > 4
    asking.no_truncation()
    asking.enable_padding(length=1000)
    asking.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_folder(tmp_path).encode(TEXT)) < 1000


def test_other_threads_go_on_while_a_long_text_becomes_tokens() -> None:
    of, turns = tokenizer("bytes"), 0
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(of.encode, TEXT * 4000)
        while not encoding.done():
            # Gives the interpreter away, and has it back only if the other thread lets go of it.
            time.sleep(0.001)
            turns += 1
    assert turns > 10


def test_a_character_comes_whole_with_the_last_of_its_bytes() -> None:
    of = tokenizer("sentencepiece")
    tokens = [library("sentencepiece").token_to_id(f"<0x{byte:02X}>") for byte in "é😀".encode()]
    assert streamed(of, tokens) == ["", "é", "", "", "", "😀", ""]


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_text_streams_in_whole_characters_and_spaced_as_in_one_piece(
    kind: str, data: st.DataObject
) -> None:
    text = data.draw(st.text(st.sampled_from(TEXT), min_size=1, max_size=60))
    of = tokenizer(kind)
    tokens = of.encode(text)
    pieces = streamed(of, tokens)
    assert "".join(pieces) == of.decode(tokens) == text
    assert HALF_CHARACTER not in "".join(pieces)


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_what_follows_a_prompt_is_spelled_as_behind_it(kind: str, data: st.DataObject) -> None:
    of = tokenizer(kind)
    tokens = of.encode(data.draw(st.text(st.sampled_from(TEXT), min_size=20, max_size=60)))
    whole = [n for n in range(len(tokens)) if not of.decode(tokens[:n]).endswith(HALF_CHARACTER)]
    cut = data.draw(st.sampled_from(whole))
    answer = "".join(streamed(of, tokens[cut:], context=tokens[:cut]))
    assert of.decode(tokens[:cut]) + answer == of.decode(tokens)


def test_a_character_that_the_prompt_has_half_of_is_completed() -> None:
    of = tokenizer("bytes")
    tokens = [library("bytes").token_to_id(c) for c in "aðŁĺĢ"]
    assert of.decode(tokens) == "a😀"
    assert streamed(of, tokens[3:], context=tokens[:3]) == ["", "😀", ""]


@given(st.lists(st.integers(0, 329), max_size=60))
def test_any_tokens_of_bytes_stream_as_they_decode_in_one_piece(tokens: list[int]) -> None:
    """As those of random weights, which seldom make up characters."""
    of = tokenizer("bytes")
    assert "".join(streamed(of, tokens)) == of.decode(tokens)


def test_no_tokens_of_characters_and_bytes_keep_later_text_back() -> None:
    """Bytes that are no character spoil all bytes in a row with them, if decoded in one piece."""
    of, rng = tokenizer("sentencepiece"), random.Random(1)
    letter = library("sentencepiece").token_to_id("s")
    byte = {b: library("sentencepiece").token_to_id(f"<0x{b:02X}>") for b in range(256)}
    assert streamed(of, [byte[0xC3], byte[0xA9], byte[0xFF], letter]) == [
        "",
        "é",
        "",
        "\ufffds",
        "",
    ]
    for _ in range(100):
        noise = [rng.choice(list(byte.values())) for _ in range(rng.randrange(30))]
        assert "".join(streamed(of, [*noise, letter, letter])).endswith("ss")


def test_bytes_that_never_make_up_a_character_are_given_after_a_while() -> None:
    of, token = tokenizer("bytes"), library("bytes").token_to_id("ÿ")
    pieces = streamed(of, [token] * (2 * HELD_TOKENS + 1))
    assert [len(piece) for piece in pieces if piece] == [HELD_TOKENS, HELD_TOKENS, 1]


class Counting(Tokenizer):
    """Knows how many tokens it decoded."""

    decoded = 0

    def decode(self, tokens: Sequence[int]) -> str:
        self.decoded += len(tokens)
        return super().decode(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_not_decoded_again_and_again(kind: str) -> None:
    """As those that follow the end of a sequence which is told to go on."""
    of, ends = Counting(library(kind)), [library(kind).token_to_id("</s>")] * 1000
    tokens = of.encode("A stream of tokens")
    pieces = streamed(of, [*ends, *tokens[4:], *ends], context=tokens[:4])
    assert of.decode(tokens[:4]) + "".join(pieces) == of.decode(tokens)
    assert of.decoded < 100 * len(pieces)


@pytest.mark.parametrize("text", [None, "{", '{"model": {"type": "none"}}'])
def test_a_file_that_is_no_tokenizer_is_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.from_folder(tmp_path)
