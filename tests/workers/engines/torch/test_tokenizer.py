import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from app.core.errors import ConfigError
from tests.workers.engines.torch.checkpoints import KINDS, TEXT, library
from workers.engines.torch.tokenizer import HALF_CHARACTER, PENDING_TOKENS, FileTokenizer


@cache
def tokenizer(kind):
    return FileTokenizer(library(kind))


def streamed(of, tokens, context=()):
    stream = of.stream(context)
    return [*map(stream.push, tokens), stream.end()]


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_restored_from_its_tokens(kind, tmp_path):
    library(kind).save(str(tmp_path / "tokenizer.json"))
    read = FileTokenizer.from_folder(tmp_path)
    tokens = read.encode(TEXT)
    assert tokens[0] == library(kind).token_to_id("<s>")
    assert read.decode(tokens) == TEXT


def test_truncation_and_padding_set_in_the_file_are_ignored(tmp_path):
    configured = Library.from_str(library("bytes").to_str())
    configured.enable_truncation(4)
    configured.save(str(tmp_path / "tokenizer.json"))
    assert len(FileTokenizer.from_folder(tmp_path).encode(TEXT)) > 4
    configured.no_truncation()
    configured.enable_padding(length=1000)
    configured.save(str(tmp_path / "tokenizer.json"))
    assert len(FileTokenizer.from_folder(tmp_path).encode(TEXT)) < 1000


def test_other_threads_run_while_a_long_text_is_tokenized():
    of, turns = tokenizer("bytes"), 0
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(of.encode, TEXT * 4000)
        while not encoding.done():
            # Sleeping releases the GIL; this thread goes on only if the other one releases it too.
            time.sleep(0.001)
            turns += 1
    assert turns > 10


def test_a_character_is_given_whole_with_the_last_of_its_bytes():
    of = tokenizer("sentencepiece")
    tokens = [library("sentencepiece").token_to_id(f"<0x{byte:02X}>") for byte in "é😀".encode()]
    assert streamed(of, tokens) == ["", "é", "", "", "", "😀", ""]


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_text_streams_in_whole_characters_and_spaced_as_if_decoded_at_once(kind, data):
    text = data.draw(st.text(st.sampled_from(TEXT), min_size=1, max_size=60))
    of = tokenizer(kind)
    tokens = of.encode(text)
    pieces = streamed(of, tokens)
    assert "".join(pieces) == of.decode(tokens) == text
    assert HALF_CHARACTER not in "".join(pieces)


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_text_that_follows_a_prompt_is_decoded_in_its_context(kind, data):
    of = tokenizer(kind)
    tokens = of.encode(data.draw(st.text(st.sampled_from(TEXT), min_size=20, max_size=60)))
    whole = [n for n in range(len(tokens)) if not of.decode(tokens[:n]).endswith(HALF_CHARACTER)]
    cut = data.draw(st.sampled_from(whole))
    answer = "".join(streamed(of, tokens[cut:], context=tokens[:cut]))
    assert of.decode(tokens[:cut]) + answer == of.decode(tokens)


def test_a_character_split_between_prompt_and_output_is_completed():
    of = tokenizer("bytes")
    tokens = [library("bytes").token_to_id(c) for c in "aðŁĺĢ"]
    assert of.decode(tokens) == "a😀"
    assert streamed(of, tokens[3:], context=tokens[:3]) == ["", "😀", ""]


@given(st.lists(st.integers(0, 329), max_size=60))
def test_any_byte_level_tokens_stream_as_if_decoded_at_once(tokens):
    """Such as those of random weights, which rarely form characters."""
    of = tokenizer("bytes")
    assert "".join(streamed(of, tokens)) == of.decode(tokens)


def test_invalid_bytes_among_characters_hold_no_later_text_back():
    """Decoded at once, bytes that form no character spoil all bytes in a row with them."""
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


def test_bytes_that_never_form_a_character_are_given_after_a_while():
    of, token = tokenizer("bytes"), library("bytes").token_to_id("ÿ")
    pieces = streamed(of, [token] * (2 * PENDING_TOKENS + 1))
    assert [len(piece) for piece in pieces if piece] == [PENDING_TOKENS, PENDING_TOKENS, 1]


class CountingTokenizer(FileTokenizer):
    """Counts the tokens that it decodes."""

    decoded = 0

    def decode(self, tokens):
        self.decoded += len(tokens)
        return super().decode(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_of_a_long_text_costs_no_more_than_one_of_a_short_text(kind):
    of = CountingTokenizer(library(kind))
    tokens = of.encode("A stream of tokens " * 100)
    assert "".join(streamed(of, tokens)) == of.decode(tokens)
    assert of.decoded < 10 * len(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_not_decoded_over_and_over(kind):
    """Such as those generated after the end of a sequence with `ignore_eos`."""
    of, ends = CountingTokenizer(library(kind)), [library(kind).token_to_id("</s>")] * 1000
    tokens = of.encode("A stream of tokens")
    pieces = streamed(of, [*ends, *tokens[4:], *ends], context=tokens[:4])
    assert of.decode(tokens[:4]) + "".join(pieces) == of.decode(tokens)
    assert of.decoded < 100 * len(pieces)


@pytest.mark.parametrize("text", [None, "{", '{"model": {"type": "none"}}'])
def test_a_file_that_is_not_a_tokenizer_is_refused(text, tmp_path):
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read"):
        FileTokenizer.from_folder(tmp_path)
