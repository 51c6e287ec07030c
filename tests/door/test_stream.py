"""What the door sees in answers."""

import pytest

from app.door.answer import events as events_module
from app.door.answer.events import Events, usage_in
from app.door.answer.stream import Stream, Whole
from app.door.record import Usage

CREATED = b'event: response.created\ndata: {"type":"response.created"}\n\n'
IN_PROGRESS = b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n'


def test_what_a_response_says_before_its_first_token_is_not_one():
    stream = Stream(drops_usage=False)
    for events in (CREATED, IN_PROGRESS):
        assert stream.passed(events) == events
        assert not stream.has_first_token
    assert stream.passed(DELTA) == DELTA
    assert stream.has_first_token


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}', 0),
        (b'data: {"choices":[{"delta":{"content":"a"}}]}', 1),
        (b'data: {"choices":[{"delta":{"reasoning":"a","reasoning_content":"a"}}]}', 1),
        (b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{"}}]}}]}', 1),
        (b'data: {"choices":[{"text":" \\"text\\":\\"a"}]}', 1),
        (b'event: content_block_delta\ndata: {"delta":{"type":"text_delta","text":"a"}}', 1),
        (b'event: content_block_delta\ndata: {"delta":{"partial_json":"{"}}', 1),
        (b'event: content_block_start\ndata: {"content_block":{"type":"text","text":""}}', 0),
        (b'event: response.output_text.delta\ndata: {"item_id":"m","delta":"a"}', 1),
        (b'data: {"choices":[],"usage":{"prompt_tokens":1}}', 0),
        (b"data: [DONE]", 0),
    ],
)
def test_events_with_something_of_the_answer_are_counted(event, said):
    stream = Stream(drops_usage=False)
    stream.passed(event + b"\n\n")
    stream.passed(event + b"\n\n" + event + b"\n\n")
    assert stream.num_said == 3 * said


def test_a_first_token_is_seen_behind_what_came_with_it():
    stream = Stream(drops_usage=False)
    stream.passed(CREATED + IN_PROGRESS + DELTA)
    assert stream.has_first_token


@pytest.mark.parametrize(
    ("text", "usage"),
    [
        (
            b'{"usage":{"input_tokens":8,"output_tokens":2,"cache_read_input_tokens":32,'
            b'"cache_creation_input_tokens":64}}',
            Usage(104, 2, 32),
        ),
        (
            b'{"usage":{"input_tokens":8,"output_tokens":2,"cache_read_input_tokens":32}}',
            Usage(40, 2, 32),
        ),
        (b'{"usage":{"input_tokens":8,"output_tokens":2}}', Usage(8, 2, None)),
        (
            b'{"usage":{"input_tokens":40,"output_tokens":2,'
            b'"input_tokens_details":{"cached_tokens":32}}}',
            Usage(40, 2, 32),
        ),
    ],
)
def test_cached_tokens_are_part_of_the_prompt_whoever_counts(text, usage):
    assert usage_in(text) == usage


@pytest.mark.parametrize(
    "counts",
    [
        b'"prompt_tokens":-3,"completion_tokens":2',
        b'"prompt_tokens":3,"completion_tokens":-2',
        b'"prompt_tokens":"3","completion_tokens":2',
        b'"prompt_tokens":3,"completion_tokens":2.0',
        b'"prompt_tokens":3,"completion_tokens":true',
        b'"prompt_tokens":3,"completion_tokens":1000000000000000000',
        b'"prompt_tokens":3,"completion_tokens":101',
        b'"prompt_tokens":3,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}',
        b'"prompt_tokens":3,"cache_read_input_tokens":1,"cache_creation_input_tokens":"1"',
        b'"prompt_tokens":' + b"[" * 1000 + b"]" * 1000,
    ],
)
def test_a_usage_that_cannot_be_is_none(counts):
    assert usage_in(b'{"usage":{%b}}' % counts, max_tokens=100) is None


def test_each_piece_of_a_long_event_is_looked_through_once(monkeypatch):
    looked_at = 0

    class Held(bytearray):
        def rfind(self, mark, begin):
            nonlocal looked_at
            looked_at += len(self) - begin
            return super().rfind(mark, begin)

    monkeypatch.setattr(events_module, "bytearray", Held, raising=False)
    events = Events(8 * 2**20)
    piece = b"x" * 65536
    passed = sum(len(events.whole(piece)) for _ in range(1000))
    assert passed + len(events.rest()) == 1000 * len(piece)
    assert looked_at <= 2 * 1000 * (len(piece) + 2)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_wherever_a_stream_is_cut_its_events_stay_whole_but_for_the_usage(end):
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}'
    one = b'data: {"choices":[{"index":0,"text":"a"}]}'
    nulls = b'data: {"choices":[{"index":0,"text":"b"}],"usage":null}'
    counts = b'data: {"choices":[{"index":0,"text":"c"}],"usage":{"prompt_tokens":3}}'
    text = end.join((nulls, one, usage, counts, nulls, usage, one, b""))
    for cut in range(len(text)):
        stream = Stream(drops_usage=True)
        passed = stream.passed(text[:cut]) + stream.passed(text[cut:]) + stream.rest()
        assert passed == end.join((nulls, one, counts, nulls, one, b""))
        assert usage_in(stream.tail) == Usage(3, 1, None)


def test_what_a_message_counted_as_it_began_is_not_lost():
    start = (
        b'event: message_start\ndata: {"type":"message_start","message":{"usage":'
        b'{"input_tokens":7,"cache_read_input_tokens":3,"output_tokens":0}}}\n\n'
    )
    for last in (b'{"output_tokens":5}', b'{"input_tokens":0,"output_tokens":5}'):
        delta = b'event: message_delta\ndata: {"type":"message_delta","usage":%b}\n\n' % last
        for pieces in ((start + delta,), (start, delta)):
            stream = Stream(drops_usage=False)
            for piece in pieces:
                stream.passed(piece)
            assert usage_in(stream.tail, start=stream.start) == Usage(10, 5, 3)


def test_usage_counts_however_far_from_the_end_it_comes():
    counts = b'"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11}'
    body = b'{%b,"text":"%b","usage_of":1}' % (counts, b"x" * 500_000)
    assert usage_in(body) == Usage(9, 2, None)
    stream = Stream(drops_usage=False)
    stream.passed(b"data: " + body + b"\n\n" + b'data: {"usage":null}\n\n' * 1000)
    assert usage_in(stream.tail) == Usage(9, 2, None)
    for at in (1, 30, len(counts) - 1, 4000):
        whole = Whole()
        for piece in (body[:at], body[at:]):
            whole.passed(piece)
        assert usage_in(whole.tail) == Usage(9, 2, None)
