"""Which engines take ids that were made at the door, and where."""

import pytest

from app.door.answer_request import Api, ids_field


@pytest.mark.parametrize(
    ("engine", "api", "field"),
    [
        ("vllm 0.31.2", Api.CHAT, ""),
        ("vllm 0.32.0", Api.CHAT, "kv_transfer_params"),
        ("vllm 0.32.0", Api.MESSAGES, "kv_transfer_params"),
        ("vllm 1.0", Api.RESPONSES, "kv_transfer_params"),
        ("vllm nightly", Api.CHAT, ""),
        ("sglang 0.5.23", Api.CHAT, "input_ids"),
        ("sglang 0.5.23", Api.MESSAGES, ""),
        ("sglang 0.5.23", Api.RESPONSES, ""),
        ("kvroute-sim 0.1.0", Api.CHAT, "kv_transfer_params"),
        ("", Api.MESSAGES, ""),
        ("", Api.COMPLETIONS, "prompt"),
    ],
)
def test_ids_go_where_the_engine_takes_them(engine, api, field):
    assert ids_field(api, engine) == field
