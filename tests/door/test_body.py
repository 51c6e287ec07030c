"""Members of bodies, and the same bytes with some changed; orjson says what is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.errors import InvalidRequest
from app.door.body import MAX_MEMBERS, JsonBody
from app.http import numbers

BLANK = st.text(" \t\r\n", max_size=2)
NAMES = st.sampled_from(
    [
        "model",
        "prompt",
        "input",
        "stream",
        "",
        "a,b",
        '"',
        "\\",
        '\\"',
        "{[",
        "]}:",
        "é",
        "\0",
        "😀",
    ]
)


@pytest.fixture(params=["with simdjson", "without"])
def _each_parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.setattr(numbers, "simdjson", None)
    elif numbers.simdjson is None:
        pytest.skip("simdjson has no wheel for this Python")


each_parser = pytest.mark.usefixtures("_each_parser")


@st.composite
def strings(draw: st.DrawFn, text: st.SearchStrategy[str]) -> str:
    """A string in JSON, some of its characters escaped in one of the ways that there are."""
    plain = draw(text)
    if draw(st.booleans()):
        return orjson.dumps(plain).decode()
    units = plain.encode("utf-16-be")
    escaped = (f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
    return f'"{"".join(escaped)}"'


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | NAMES
SCALARS = st.one_of(
    strings(TEXT),
    st.sampled_from(["true", "false", "null", "-0", "1e3", "123456789012345678901234567890"]),
    st.integers(-(2**65), 2**65).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda x: orjson.dumps(x).decode()),
)


@st.composite
def containers(draw: st.DrawFn, inner: st.SearchStrategy[str]) -> str:
    items = draw(st.lists(st.tuples(BLANK, inner, BLANK).map("".join), max_size=4))
    if draw(st.booleans()):
        return f"[{','.join(items) or draw(BLANK)}]"
    named = [f"{draw(strings(NAMES))}{draw(BLANK)}:{item}" for item in items]
    return f"{{{','.join(named)}}}"


VALUES = st.one_of(
    st.recursive(SCALARS, containers, max_leaves=12),
    st.lists(st.integers(-1, 2**64), max_size=5).map(str),
    st.sampled_from(["[true, 1]", "[ 7 ,\n8 ]", "[[1, 2]]", "[1.0]", '"[1]"', '""']),
)


@st.composite
def members(draw: st.DrawFn) -> list[tuple[str, str, str]]:
    """Names, and the texts around their values: before, value, after."""
    names = draw(st.lists(NAMES, unique=True, max_size=6))
    return [
        (
            name,
            f"{draw(BLANK)}{draw(strings(st.just(name)))}{draw(BLANK)}:{draw(BLANK)}",
            f"{draw(VALUES)}\0{draw(BLANK)}",
        )
        for name in names
    ]


def text_of(parts: list[str], around: tuple[str, str, str, str], *, empty: bool) -> bytes:
    before, blank, _, after = around
    return f"{before}{{{','.join(parts) or (blank if empty else '')}}}{after}".encode()


def plain(fields: Any) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in fields.items()
    }


@each_parser
@given(
    given_members=members(),
    around=st.tuples(BLANK, BLANK, BLANK, BLANK),
    changes=st.dictionaries(NAMES, st.sampled_from([None, 1, "x", [1, 2], {"a": {}}]), max_size=3),
    removed=st.sets(NAMES, max_size=3),
)
@settings(max_examples=400, deadline=None)
def test_only_the_members_named_change_and_every_other_byte_stays(
    given_members: list[tuple[str, str, str]],
    around: tuple[str, str, str, str],
    changes: dict[str, object],
    removed: set[str],
) -> None:
    removed -= changes.keys()
    raw = text_of(
        [key + value.replace("\0", "") for _, key, value in given_members], around, empty=True
    )
    body = JsonBody.parse(raw)
    assert plain(body.fields) == orjson.loads(raw)
    assert list(body.fields) == list(orjson.loads(raw))
    spliced = body.spliced(changes, removed)
    expected = {n: v for n, v in orjson.loads(raw).items() if n not in removed} | changes
    assert orjson.loads(spliced) == expected
    parts = [
        key + (orjson.dumps(changes[name]).decode() + value.partition("\0")[2])
        if name in changes
        else key + value.replace("\0", "")
        for name, key, value in given_members
        if name not in removed
    ]
    present = {name for name, _, _ in given_members}
    parts += [
        f"{orjson.dumps(name).decode()}:{orjson.dumps(value).decode()}"
        for name, value in changes.items()
        if name not in present
    ]
    if given_members or not parts:
        assert spliced == text_of(parts, around, empty=not given_members)


@each_parser
@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b'{"model": 1, "model": 1}', "model"),
        (b'{"model": 1, "mod\\u0065l": 2}', "model"),
        (b'{"prompt": [1, 2], "stream": true, "prompt": "x"}', "prompt"),
        (b'{"a": {"a": 1}, "b": [{"c": 1}], "b": 1}', "b"),
        (b'{"\\\\": 1, "\\"": 2, "\\u005c": 3}', "\\"),
        (b'{"": 123456789012345678901234567890, "": 1}', ""),
    ],
)
def test_a_name_that_comes_twice_is_refused_and_named(raw: bytes, name: str) -> None:
    with pytest.raises(InvalidRequest, match="comes twice") as refused:
        JsonBody.parse(raw)
    assert refused.value.field == name


@each_parser
def test_a_long_name_that_comes_twice_is_not_repeated_whole() -> None:
    with pytest.raises(InvalidRequest) as refused:
        JsonBody.parse(b'{"%b": 1, "%b": 2}' % (b"x" * 1000, b"x" * 1000))
    assert len(str(refused.value)) < 100


@each_parser
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'"x"',
        b"{",
        b'{"a": 1',
        b'{"a": 1} x',
        b"\xef\xbb\xbf{}",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": "\\ud800"}',
        b'{"a": "\xff"}',
        b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"a": ' * 5000,
        b'{"prompt": [1, 2}',
        b'{"prompt": [1, 2], }',
        b'{"prompt": "x"prompt": [1]"}',
    ],
)
def test_what_is_no_object_in_json_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        JsonBody.parse(raw)
    assert refused.value.field == "body"


@each_parser
def test_deep_nesting_is_skipped() -> None:
    deep = b"[" * 1000 + b"]" * 1000
    body = JsonBody.parse(b'{"a": %b, "b": 1, "c": %b}' % (deep, deep))
    assert body.spliced({"b": 2}, ["a"]) == b'{ "b": 2, "c": %b}' % deep


@each_parser
@pytest.mark.parametrize("ids", [[1], [0, 2**64 - 1], list(range(20_000))])
@pytest.mark.parametrize("name", ["prompt", "input"])
def test_arrays_of_ids_are_arrays_of_numpy(name: str, ids: list[int]) -> None:
    raw = orjson.dumps({"model": "m", name: ids, "stop": ["[1]"]})
    value = JsonBody.parse(raw).fields[name]
    assert (value.dtype, value.tolist()) == (np.uint64, ids)


@each_parser
@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": []}',
        b'{"prompt": [-1]}',
        b'{"prompt": [true, 1]}',
        b'{"prompt": [1.0, 2]}',
        b'{"prompt": [[1, 2]]}',
        b'{"prompt": [18446744073709551616]}',
        b'{"prompt": "\\"prompt\\": [1]"}',
        b'{"x\\"prompt": [1]}',
        b'{"a": {"prompt": [1]}, "prompt": ""}',
        b'{"a": {"prompt": [1]}, "b": "", "prompt": "", "input": "[1]"}',
        b'{"prompt": "", "stop": [1]}',
        b'{"a": "{", "prompt": "[1]", "input": {"prompt": [1]}}',
    ],
)
def test_all_else_is_as_orjson_gives_it(raw: bytes) -> None:
    fields = JsonBody.parse(raw).fields
    assert fields == orjson.loads(raw)
    assert not any(isinstance(value, np.ndarray) for value in fields.values())


def test_arrays_of_numpy_can_be_spliced_in() -> None:
    ids = np.arange(3, dtype=np.uint64)
    body = JsonBody.parse(b'{"prompt": "abc"}')
    assert body.spliced({"prompt": ids, "x": {"ids": ids}}) == (
        b'{"prompt": [0,1,2],"x":{"ids":[0,1,2]}}'
    )


@each_parser
def test_a_long_string_and_its_end_may_lie_anywhere_in_the_pieces_that_are_scanned() -> None:
    for size in range(65_520, 65_545):
        text = b"x, {[" * (3 * size // 5) + b'\\"' + b"]}" * (size % 5)
        body = JsonBody.parse(b'{"a": "%b", "b": [{}, 1], "c": {"b": [2, 3]}}' % text)
        assert body.spliced({"c": 1}, ["b"]) == b'{"a": "%b", "c": 1}' % text


@each_parser
@pytest.mark.parametrize("name", [b"n%d", b"n"])
def test_more_members_than_any_api_has_are_refused(name: bytes) -> None:
    def raw(count: int) -> bytes:
        return b"{%b}" % b",".join(
            b'"%b": 1' % (name % i if b"%" in name else name) for i in range(count)
        )

    with pytest.raises(InvalidRequest, match=f"over {MAX_MEMBERS} members"):
        JsonBody.parse(raw(MAX_MEMBERS + 1))
    if b"%" in name:
        body = JsonBody.parse(raw(MAX_MEMBERS))
        assert len(orjson.loads(body.spliced({}, [f"n{MAX_MEMBERS - 1}"]))) == MAX_MEMBERS - 1
