"""Members of bodies, and the same with some changed; orjson says what is right."""

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.errors import InvalidRequest
from app.http import numbers
from app.http.json_body import (
    MAX_HALVED_BYTES,
    MAX_HALVES,
    MAX_IDS,
    MAX_LISTS,
    MAX_MEMBERS,
    MAX_VALUES,
    JsonBody,
)

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
def _each_parser(request, monkeypatch):
    if request.param == "without":
        monkeypatch.setattr(numbers, "simdjson", None)
    elif numbers.simdjson is None:
        pytest.skip("simdjson has no wheel for this Python")


each_parser = pytest.mark.usefixtures("_each_parser")


@st.composite
def strings(draw, text):
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
def containers(draw, inner):
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
def members(draw):
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


def text_of(parts, around):
    before, blank, _, after = around
    return f"{before}{{{','.join(parts) or blank}}}{after}".encode()


def plain(fields):
    """As orjson would give them."""
    return {name: _plain(fields[name]) for name in fields}


def _plain(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list) and value and isinstance(value[0], np.ndarray):
        return [ids.tolist() for ids in value]
    return value


@each_parser
@given(
    given_members=members(),
    around=st.tuples(BLANK, BLANK, BLANK, BLANK),
    changes=st.dictionaries(NAMES, st.sampled_from([None, 1, "x", [1, 2], {"a": {}}]), max_size=3),
)
@settings(max_examples=80)
def test_members_stay_as_they_came_but_for_those_that_are_changed(given_members, around, changes):
    raw = text_of([key + value.replace("\0", "") for _, key, value in given_members], around)
    body = JsonBody.parse(raw)
    expected = orjson.loads(raw)
    assert list(body.fields) == list(expected)
    for name, value in plain(body.fields).items():
        assert value == expected[name] or [value] == expected[name]  # ids alone in an array
    texts = {name: value.partition("\0")[0].encode() for name, _, value in given_members}
    texts |= {name: orjson.dumps(value) for name, value in changes.items()}
    made = JsonBody.parse(body.changed(changes)).members
    assert [(name, bytes(text)) for name, text in made.items()] == [*texts.items()]


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
def test_a_name_that_comes_twice_is_refused_and_named(raw, name):
    with pytest.raises(InvalidRequest, match="comes twice") as refused:
        JsonBody.parse(raw)
    assert refused.value.field == name


@each_parser
def test_a_long_name_that_comes_twice_is_not_repeated_whole():
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
        b'{"a": "\\ud80"}',
        b'{"\xc0\xaf": 1}',
        b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"a": ' * 5000,
        b'{"prompt": [1, 2}',
        b'{"prompt": [1, 2], }',
        b'{"prompt": "x"prompt": [1]"}',
    ],
)
def test_what_is_no_object_in_json_is_refused(raw):
    with pytest.raises(InvalidRequest) as refused:
        JsonBody.parse(raw)
    assert refused.value.field == "body"


@pytest.mark.parametrize("text", [b"1e999", b'"\xff"'])
def test_what_cannot_be_read_is_refused_when_it_is_looked_at(text):
    body = JsonBody.parse(b'{"a": %b, "b": 1}' % text)
    assert body.fields["b"] == 1
    with pytest.raises(InvalidRequest) as refused:
        body.fields.get("a")
    assert refused.value.field == "a"


def test_deep_nesting_passes_unread():
    deep = b"[" * 900 + b"]" * 900
    body = JsonBody.parse(b'{"a": %b, "b": 1, "c": %b}' % (deep, deep))
    assert body.changed({"b": 2}) == b'{"a":%b,"b":2,"c":%b}' % (deep, deep)


@each_parser
@pytest.mark.parametrize("ids", [[1], [0, 2**64 - 1], list(range(20_000))])
@pytest.mark.parametrize("name", ["prompt", "input"])
def test_arrays_of_ids_are_arrays_of_numpy(name, ids):
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
        b'{"prompt": [[1], 2]}',
        b'{"prompt": [1, [2]]}',
        b'{"prompt": [18446744073709551616]}',
        b'{"prompt": "\\"prompt\\": [1]"}',
        b'{"x\\"prompt": [1]}',
        b'{"a": {"prompt": [1]}, "prompt": ""}',
        b'{"a": {"prompt": [1]}, "b": "", "prompt": "", "input": "[1]"}',
        b'{"prompt": "", "stop": [1]}',
        b'{"a": "{", "prompt": "[1]", "input": {"prompt": [1]}}',
    ],
)
def test_all_else_is_as_orjson_gives_it(raw):
    fields = dict(JsonBody.parse(raw).fields)
    assert fields == orjson.loads(raw)
    assert not any(isinstance(value, np.ndarray) for value in fields.values())


@each_parser
def test_arrays_of_ids_in_an_array_are_arrays_of_numpy_too():
    fields = JsonBody.parse(b'{"prompt": [ [1, 2] ], "input": [[1], [2, 3]]}').fields
    assert fields["prompt"].tolist() == [1, 2]
    assert [ids.tolist() for ids in fields["input"]] == [[1], [2, 3]]


@each_parser
async def test_ids_from_a_router_are_no_values_to_be_counted():
    ids = list(range(MAX_VALUES + 1))
    raw = orjson.dumps({"kv_transfer_params": {"prompt_token_ids": ids, "a": 1}})
    params = (await JsonBody.read(raw)).fields["kv_transfer_params"]
    assert params["prompt_token_ids"].tolist() == ids
    assert params["a"] == 1


def test_arrays_of_numpy_can_be_set():
    ids = np.arange(3, dtype=np.uint64)
    body = JsonBody.parse(b'{"prompt": "abc"}')
    assert body.changed({"prompt": ids, "x": {"ids": ids}}) == (
        b'{"prompt":[0,1,2],"x":{"ids":[0,1,2]}}'
    )


_IDS = b"[%b0]," % (b"0," * (MAX_VALUES // MAX_LISTS))


@pytest.mark.parametrize(
    ("member", "refused"),
    [
        (b'"messages":[%b{}]' % (b"{}," * (MAX_VALUES // 2)), True),
        (b'"messages":[%b""]' % (b'"a\\"",' * MAX_VALUES), True),
        (b'"a":{%b"b":0}' % (b'"b":0,' * MAX_VALUES), True),
        (b",".join(b'"a%d":[%b0]' % (i, b"[]," * 200) for i in range(MAX_VALUES // 200)), True),
        (b'"prompt":[%b[]]' % (_IDS * MAX_LISTS), True),
        (b'"prompt":[%b0]' % (b"0," * (MAX_IDS + 1)), True),
        (b'"prompt":[%b0]' % (b"0," * (MAX_VALUES + 1)), False),
        (b'"input":[%b[0]]' % (_IDS * (MAX_LISTS - 2)), False),
        (b'"text":"%b"' % (b"[{," * MAX_VALUES), False),
        (b'"text":"%b"' % (b'\\"[{,\\\\' * MAX_VALUES), False),
    ],
)
async def test_more_values_than_can_be_read_in_time_are_refused(member, refused):
    raw = b'{"model":"m",%b}' % member
    if refused:
        with pytest.raises(InvalidRequest, match="over"):
            await JsonBody.read(raw)
    else:
        assert (await JsonBody.read(raw)).changed({}) == raw


def test_more_members_than_any_api_has_are_refused():
    def raw(count):
        return b"{%b}" % b",".join(b'"n%d": 1' % i for i in range(count))

    with pytest.raises(InvalidRequest, match=f"over {MAX_MEMBERS} members"):
        JsonBody.parse(raw(MAX_MEMBERS + 1))
    assert len(JsonBody.parse(raw(MAX_MEMBERS)).members) == MAX_MEMBERS


@each_parser
def test_half_a_character_becomes_one_that_stands_for_none():
    raw = rb'{"a": "\ud83d \\ud83d \ud83d\ude00 \\\ude00", "b": 1}'
    body = JsonBody.parse(raw)
    assert body.fields["a"] == "\ufffd \\ud83d \U0001f600 \\\ufffd"
    assert body.text == rb'{"a": "\ufffd \\ud83d \ud83d\ude00 \\\ufffd", "b": 1}'
    for said in (rb"\ud83d", rb"\ud83d \\ud83d \ud83d\ude00 \\\\ud83d x"):
        text = b'{"a": "%b"}' % said
        assert JsonBody.parse(text).text == text.replace(rb"\ud83d", rb"\ufffd", 1)
    assert JsonBody.parse(rb'{"a": "\\ud83d"}').text == rb'{"a": "\\ud83d"}'
    for many in (raw + b" " * MAX_HALVED_BYTES, rb'{"a": "%b"}' % (rb"\ud83d" * (MAX_HALVES + 1))):
        with pytest.raises(InvalidRequest):
            JsonBody.parse(many)
