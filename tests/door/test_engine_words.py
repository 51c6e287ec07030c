"""What logs have of what engines say: their own words, and nothing of a request."""

import json

import pytest

from app.door.engine.words import MAX_SAID_BYTES, MAX_WORDS, EngineWords
from app.http.json_body import JsonBody

SECRET = "My password is hunter2 — please »tell« nobody\nat all"


def request(**members):
    return JsonBody.parse(json.dumps({"model": "some-model-of-mine", **members}).encode())


def chat(text=SECRET):
    return request(messages=[{"role": "user", "content": text}])


def said(message):
    return json.dumps({"error": {"message": message, "code": 500}}).encode()


OOM = "CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.mark.parametrize(
    "body",
    [
        said(OOM),
        json.dumps({"error": OOM}).encode(),
        json.dumps({"detail": OOM}).encode(),
        json.dumps({"object": "error", "message": OOM}).encode(),
        json.dumps({"type": "error", "error": {"type": "api_error", "message": OOM}}).encode(),
        OOM.encode(),
        f'data: {{"error": {{"message": "{OOM}"}}}}\n\n'.encode(),
        f': hi\n\nevent: error\ndata: {{"error": {{"message": "{OOM}"}}}}\n\n'.encode(),
        (
            'event: response.failed\ndata: {"type": "response.failed", "response": '
            f'{{"status": "failed", "error": {{"message": "{OOM}"}}}}}}\n\n'
        ).encode(),
    ],
)
def test_an_engines_words_are_found_in_every_form(body):
    assert EngineWords().of(body, chat()) == OOM


@pytest.mark.parametrize(
    "message",
    [
        f"cannot compute: {SECRET}",
        f"cannot compute: {SECRET!r}",
        f"cannot compute: {SECRET[:30]}...",
        f"{SECRET} is bad",
        f'"{SECRET}"',
        f"[{{'type': 'missing', 'loc': ('body', 'x'), 'msg': 'no', 'input': '{SECRET}'}}]",
        f"bad value, got {SECRET}",
        f"{SECRET[3:]}",
    ],
)
def test_they_repeat_nothing_of_the_prompt(message):
    body = said(message)
    for asked in (chat(), JsonBody.parse(json.dumps({"prompt": SECRET}).encode())):
        words = EngineWords().of(body, asked)
        assert "hunter2" not in words
        assert "tell" not in words


def test_they_repeat_no_token_ids():
    words = EngineWords().of(said("bad ids [17, 4, 99, 23, 5]"), request(prompt=[17, 4, 99, 23, 5]))
    assert words == "bad ids […]"


def test_the_models_name_and_those_of_members_are_told():
    message = "The model `some-model-of-mine` does not exist; max_completion_tokens is too large"
    assert EngineWords().of(said(message), request(max_completion_tokens=9)) == message


def test_they_are_one_short_line():
    words = EngineWords().of(said("a\nb\x1b[31m" + "c" * 1000), chat())
    assert words.startswith("a b\\u001b[31mc")
    assert len(words) == MAX_WORDS
    assert EngineWords().of(b"x" * (MAX_SAID_BYTES + 1), chat()) == ""


def test_the_same_words_are_compared_with_one_request_only():
    words, long = EngineWords(), chat("x y " * 500_000)
    assert words.of(said(OOM), long) == OOM
    assert words.of(said("another error of an engine"), long) == ""  # for the moment, too much
    assert words.of(said(OOM), long) == OOM
