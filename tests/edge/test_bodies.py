"""Plainly valid bodies bypass pydantic, which must make no difference to the result."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from app.core.hashing import token_bytes
from app.edge import ask
from app.edge.ask import parse
from app.edge.schemas import FindBestWorker, RouteBody
from app.http import numbers as json_numbers

NUMBERS = ("0", "1", "70000", "4294967295", "4294967296", "18446744073709551615", "-1", "1e400")
OTHERS = ("1.0", "-0", "01", "true", "null", '"7"', '"f7f70123456789ab"', '"["', "[1]", "[]", "{}")
NAMES = (
    *("token_ids", "local_hashes", "num_tokens", "mm_hashes", "request_id", "exclude", "reserve"),
    *("junk", r"token\u005fids", r"token_ids\u0000", r"\ud800", ""),
)

value = st.sampled_from(NUMBERS + OTHERS)
numbers = st.lists(st.sampled_from(NUMBERS[:6]), max_size=4)
arrays = st.builds(
    lambda plain, odd: f"[{','.join(plain + odd)}]", numbers, st.lists(value, max_size=1)
)
nested = st.builds(lambda inner: f"[{','.join(inner)}]", st.lists(arrays, max_size=3))
fields = st.builds(
    lambda name, text: f'"{name}": {text}', st.sampled_from(NAMES), arrays | nested | value
)
objects = st.builds(lambda found: "{" + ", ".join(found) + "}", st.lists(fields, max_size=4))
bodies = st.builds(
    lambda before, text, after: (before + text + after).encode(),
    st.sampled_from(["", "", "", " ", "\ufeff"]),
    objects,
    st.sampled_from(["", "", "", " ", "}", "x"]),
)


def outcome(read):
    """What was read from a body, or the errors in it."""
    try:
        body, tokens = read()
    except ValidationError as error:
        return error.errors(include_url=False, include_context=False)
    found = body.model_dump()
    if tokens is None and found.get("token_ids") is not None:
        tokens = token_bytes(found["token_ids"])
    return found | {"token_ids": tokens}


@pytest.mark.parametrize("model", [RouteBody, FindBestWorker])
@given(raw=bodies)
@settings(max_examples=120)
def test_every_body_is_read_as_pydantic_reads_it(model, raw):
    assert outcome(lambda: parse(model, raw)) == outcome(
        lambda: (model.model_validate_json(raw), None)
    )


def test_without_simdjson_pydantic_reads_everything(monkeypatch):
    raw = b'{"token_ids": [1, 2], "reserve": false}'
    fast = outcome(lambda: parse(RouteBody, raw))
    monkeypatch.setattr(json_numbers, "simdjson", None)
    assert parse(RouteBody, raw)[1] is None
    assert outcome(lambda: parse(RouteBody, raw)) == fast


@pytest.mark.parametrize(
    "field",
    [
        '"token_ids": [-1, -1]',
        '"local_hashes": ["x", "x"]',
        '"mm_hashes": [["x", "x"]]',
        '"mm_hashes": [["x"], ["x"]]',
        '"exclude": [1, 2]',
    ],
)
def test_only_the_first_bad_item_of_an_array_is_an_error(field):
    with pytest.raises(ValidationError) as refused:
        parse(RouteBody, f"{{{field}}}".encode())
    assert refused.value.error_count() == 1


@pytest.mark.skipif(json_numbers.simdjson is None, reason="simdjson has no wheel for this Python")
def test_no_value_is_looked_up_in_a_body_with_unknown_fields():
    # To find a field, simdjson scans them all: in a body of 20,000, this took 0.75 s.
    with pytest.raises(ValueError, match=r"^junk is unknown"):
        ask._fields(RouteBody, b'{"junk": 0}')
    with pytest.raises(ValidationError, match="junk"):
        parse(RouteBody, b'{"junk": 0}')
