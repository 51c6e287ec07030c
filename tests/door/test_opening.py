"""How a stream begins, in each dialect, whatever its pieces."""

import pytest

from app.door.answer.stream import MAX_BYTES, MAX_EVENTS, Opening

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
CHUNK = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
PREAMBLES = [
    b": waiting\n\n",
    ROLE,
    b'data: {"choices": [ {"delta": {"content": "", "role": "a", "tool_calls": []}} ] }\n\n',
    b'data: {"choices":[{"text":"","finish_reason":null}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n',
    b'event: message_start\ndata: {"type":"message_start","message":{}}\n\n',
    b'event: ping\ndata: {"type":"ping"}\n\n',
    b'event: content_block_start\ndata: {"type":"content_block_start"}\n\n',
    b'event: response.created\ndata: {"type":"response.created","response":{"error":null}}\n\n',
    b'event: response.in_progress\r\ndata: {"type":"response.in_progress"}\r\n\r\n',
    b"data: whatever\n\n",
    b'data: {"choices":[{"delta":{"content":"h\n\n',
]
CONTENTS = [
    CHUNK,
    b'data: {"choices":[{"text":" error"}]}\n\n',
    b'data: {"choices":[{"delta":{"role":"assistant","content":"\\"error\\": {}"}}]}\n\n',
    b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n',
    b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"x"}}\n\n',
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"}\n\n',
]
ERRORS = [
    b'data: {"error":{"message":"died","code":500}}\n\n',
    b'data: { "error" : "died" }\n\n',
    b'data:{"object": "error", "message": "died"}\n\n',
    b'data: {"id":"x","choices":[],"error":{"message":"died"}}\n\n',
    b'data: {"error":\ndata: {"message":"died"}}\n\n',
    b'event: error\ndata: {"type":"error","error":{"type":"api_error"}}\n\n',
    b'event:error\r\ndata: "died"\r\n\r\n',
    b'event: response.failed\ndata: {"type":"response.failed"}\n\n',
    b'data: {"type": "response.failed"}\n\n',
]


def opened(*pieces):
    opening = Opening()
    for piece in pieces:
        assert not opening.is_over
        opening.take(piece)
    return opening


@pytest.mark.parametrize("event", PREAMBLES)
def test_a_preamble_is_held_back(event):
    assert not opened(event).is_over


@pytest.mark.parametrize("event", CONTENTS)
def test_a_stream_that_says_something_is_passed_on(event):
    opening = opened(*PREAMBLES, event)
    assert opening.is_over
    assert not opening.error
    assert not opening.is_empty
    assert opening.text == b"".join(PREAMBLES) + event


@pytest.mark.parametrize("event", ERRORS)
def test_an_error_before_anything_is_seen(event):
    assert opened(event).error == event
    assert opened(*PREAMBLES, event).error == event


@pytest.mark.parametrize("event", [*CONTENTS, *ERRORS])
def test_pieces_may_end_anywhere(event):
    opening = Opening()
    for byte in ROLE + event:
        opening.take(bytes([byte]))
    assert opening.is_over
    assert bool(opening.error) is (event in ERRORS)


def test_what_follows_content_is_not_of_the_opening():
    assert opened(CHUNK + ERRORS[0]).error == b""


@pytest.mark.parametrize("said", [b"", ROLE, b"data: [DONE]\n\n", b": hm\n\n"])
def test_a_stream_that_ends_without_a_word_is_empty(said):
    opening = opened(said, b"") if said else opened(b"")
    assert opening.is_over
    assert opening.is_empty


def test_an_error_that_the_end_cuts_is_one():
    assert opened(ERRORS[0].rstrip(), b"").error


def test_no_more_is_held_back_than_is_said_here():
    assert opened(*[ROLE] * MAX_EVENTS).is_over is False
    assert opened(*[ROLE] * (MAX_EVENTS + 1)).is_over
    assert opened(b": " + b"x" * MAX_BYTES).is_over


@pytest.mark.parametrize(
    "text",
    [
        b"<!doctype html>",
        b"\n <html>\n\n",
        b'{"choices":[]}',
        b"Sign in:",
        b"\x1f\x8b\x08\x00\x00\x00",
    ],
)
def test_what_is_no_stream_is_known_by_its_first_bytes(text):
    assert opened(text).is_foreign
    opening = Opening()
    for byte in text:
        opening.take(bytes([byte]))
    assert opening.is_foreign


@pytest.mark.parametrize("line", [b"\n\n", b"id: 1\n", b"retry:5\n\n", b":\n\n"])
def test_a_stream_may_begin_with_any_line_of_one(line):
    opening = opened(line + CHUNK)
    assert opening.is_over
    assert not opening.is_foreign
