"""What the door sees in the answers of other APIs than chats."""

from __future__ import annotations

import pytest

from app.door.events import Stream, usage_in
from app.door.lifecycle import Usage

CREATED = b'event: response.created\ndata: {"type":"response.created"}\n\n'
IN_PROGRESS = b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n'


def test_what_a_response_says_before_its_first_token_is_not_one() -> None:
    stream = Stream(drops_usage=False)
    for events in (CREATED, IN_PROGRESS):
        assert stream.passed(events) == events
        assert not stream.has_first_token
    assert stream.passed(DELTA) == DELTA
    assert stream.has_first_token


def test_a_first_token_is_seen_behind_what_came_with_it() -> None:
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
def test_cached_tokens_are_part_of_the_prompt_whoever_counts(text: bytes, usage: Usage) -> None:
    assert usage_in(text) == usage
