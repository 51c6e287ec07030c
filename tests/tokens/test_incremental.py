"""Ids made of remembered parts are those from scratch, whatever the tokenizer and the text."""

from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from app.tokens.encoder import Encoder
from tests.tokens import models

WIDE = "\N{FULLWIDTH LESS-THAN SIGN}s\N{FULLWIDTH GREATER-THAN SIGN}"
"""Of which NFKC makes <s>."""
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def with_odd_tokens():
    """Added tokens that take white space with them, stand for whole words, or overlap others."""
    tokenizer = models.byte_level(*SPECIAL)
    tokenizer.add_tokens(
        [
            AddedToken("<l>", lstrip=True, normalized=False),
            AddedToken("<r>", rstrip=True, normalized=False),
            AddedToken("word", single_word=True, normalized=False),
            AddedToken("</s><s>", normalized=False),
            AddedToken("a</", normalized=False),
            AddedToken("\n\n", normalized=False),
            AddedToken("<S>", normalized=True),
        ]
    )
    return tokenizer


TOKENIZERS = {
    "byte_level": lambda: models.byte_level(*SPECIAL),
    "prefix_space": lambda: models.byte_level(*SPECIAL, add_prefix_space=True),
    "split_bytes": lambda: models.split_bytes(*SPECIAL),
    "metaspace_first": lambda: models.metaspace(*SPECIAL, prepend_scheme="first"),
    "metaspace_always": lambda: models.metaspace(*SPECIAL, prepend_scheme="always"),
    "normalizing": lambda: models.normalizing(*SPECIAL),
    "with_odd_tokens": with_odd_tokens,
}


@cache
def tokenizer(name):
    return TOKENIZERS[name]()


PIECES = st.one_of(
    st.sampled_from([*SPECIAL, "<l>", "<r>", "word", "\n\n", "<S>", WIDE, "<", "</", "|>"]),
    st.sampled_from(["The work, licensed as is. ", " ", "  x", "ﬁ Å 你好 🙂", "\r\n\t", "a"]),
    st.text(max_size=8),
)
TEXTS = st.lists(PIECES, max_size=30).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("min_part_bytes", [1, 24])
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TEXTS, min_size=1, max_size=6), st.integers(0, 4_000), st.booleans())
def test_a_growing_text_has_the_ids_from_scratch_at_every_turn(
    monkeypatch, name, min_part_bytes, turns, max_bytes, special
):
    monkeypatch.setattr("app.tokens.cuts.MIN_PART_BYTES", min_part_bytes)
    encoder = Encoder(tokenizer(name), SPECIAL, max_bytes)
    text = ""
    for turn in turns:
        text += turn
        ids = encoder.encode(text, add_special_tokens=special)
        assert ids.tolist() == tokenizer(name).encode(text, add_special_tokens=special).ids
        encoder.check()


class Counting:
    """Counts the characters that a tokenizer is given."""

    def __init__(self, encoder, monkeypatch):
        self.characters = 0
        make = encoder._ids
        monkeypatch.setattr(
            encoder, "_ids", lambda text, special=False: make(self.count(text), special)
        )

    def count(self, text):
        self.characters += len(text)
        return text


def chat(*turns):
    return "".join(f"<|im_start|>user\n{turn}<|im_end|>\n" for turn in turns)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_of_a_text_that_has_grown_only_what_is_new_is_tokenized(name, monkeypatch):
    encoder = Encoder(tokenizer(name), SPECIAL, 1 << 20)
    turns = [f"{number} " + "licence " * 100 for number in range(20)]
    encoder.encode(chat(*turns))
    counting = Counting(encoder, monkeypatch)
    encoder.encode(chat(*turns, "What is new?"))
    assert 0 < counting.characters < 2_000


def test_a_turn_that_has_changed_costs_only_itself(monkeypatch):
    encoder = Encoder(tokenizer("byte_level"), SPECIAL, 1 << 20)
    turns = [f"{number} " + "licence " * 100 for number in range(20)]
    encoder.encode(chat(*turns))
    counting = Counting(encoder, monkeypatch)
    encoder.encode(chat("Without its thoughts.", *turns[1:]))
    assert 0 < counting.characters < 3_000


def test_an_id_that_ordinary_text_can_have_too_is_not_taken_for_a_place_to_cut(monkeypatch):
    """A text is normalized after the added tokens have been looked for."""
    monkeypatch.setattr("app.tokens.cuts.MIN_PART_BYTES", 1)
    made = models.metaspace(*SPECIAL)
    made.normalizer = models.normalizers.NFKC()
    encoder = Encoder(made, SPECIAL, 1 << 20)
    text = f"a<s>{WIDE}<s>b<s>"
    for _ in range(2):
        assert encoder.encode(text).tolist() == made.encode(text, add_special_tokens=False).ids
