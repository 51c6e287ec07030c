from __future__ import annotations

import pytest
from tokenizers import AddedToken

from app.tokens import cuts as module
from app.tokens.cuts import MAX_CUT_TOKENS, Cuts, cut_tokens


def added(*tokens: AddedToken | str) -> dict[int, AddedToken]:
    made = [
        AddedToken(token, special=True, normalized=False) if isinstance(token, str) else token
        for token in tokens
    ]
    return dict(enumerate(made))


def test_special_tokens_are_places_to_cut() -> None:
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
def test_a_token_that_its_surroundings_can_hide_or_widen_is_none(token: AddedToken) -> None:
    assert cut_tokens(added(token), ()) == {}


@pytest.mark.parametrize("other", ["<s>x", "x<s>", "</<", "a<s"])
def test_a_token_that_another_can_be_found_instead_of_is_none(other: str) -> None:
    assert b"<s>" not in cut_tokens(added("<s>", other), ())


def test_of_many_tokens_those_that_prompts_contain_are_looked_for() -> None:
    many = [f"<|reserved_{number}|>" for number in range(300)]
    assert cut_tokens(added(*many, "<s>"), {"<s>"}) == {b"<s>": 300}
    assert len(cut_tokens(added(*many), many)) == MAX_CUT_TOKENS


def test_parts_are_no_shorter_than_is_worth_a_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_PART_BYTES", 4)
    text = b"ab<s>cd</s><s>e<s>"
    both = [(2, b"<s>"), (7, b"</s>"), (11, b"<s>"), (15, b"<s>")]
    assert Cuts([b"<s>", b"</s>"]).of(text) == both
    assert Cuts([b"<s>"]).of(text[:10]) == [(2, b"<s>")]
    assert Cuts([b"<s>"]).of(b"nothing") == []
    assert Cuts([]).of(b"nothing") == []


@pytest.mark.parametrize("at", range(12))
def test_a_token_is_found_wherever_a_search_ends(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEARCHED_BYTES", 4)
    text = b"." * at + b"</s>" + b"." * 9
    assert Cuts([b"<s>", b"</s>"]).of(text) == [(at, b"</s>")]
