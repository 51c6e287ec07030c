"""What the body of a request asks for."""

import pytest

from app.door import answer_request
from app.door.answer_request import Api


@pytest.mark.parametrize(
    ("api", "more", "reads"),
    [
        (Api.COMPLETIONS, {}, True),
        (Api.COMPLETIONS, {"echo": True}, True),
        (Api.COMPLETIONS, {"logprobs": 5}, True),
        (Api.COMPLETIONS, {"echo": True, "logprobs": 0}, False),
        (Api.CHAT, {"echo": True}, False),
        (Api.CHAT, {"echo": True, "top_logprobs": None}, True),
        (Api.CHAT, {"prompt_logprobs": 0}, False),
    ],
)
def test_probabilities_of_the_prompt_make_an_engine_pass_its_cache_by(api, more, reads):
    assert answer_request.read(api, more).reads_cache == reads
