"""A dry run of a chat is rendered and tokenized as the chat itself would be."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.door.conftest import MODEL
from tests.eventually import eventually

CHAT = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are brief. " * 40},
        {"role": "user", "content": "Which tool would you use?"},
    ],
}
PREFIX = "/console/api/prefix"


async def test_a_dry_run_of_a_chat_finds_the_worker_that_has_it(door: httpx.AsyncClient) -> None:
    answer = await door.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2})
    worker = answer.headers["x-kvroute-worker"]

    async def found() -> dict[str, Any]:
        return dict((await door.post(PREFIX, json=CHAT)).raise_for_status().json())

    shown = await eventually(found, lambda f: bool(f["holders"]["rows"]))
    # It may be routed elsewhere: work is spread over idle workers.
    assert shown["route"]["best_worker"].startswith(worker)
    held = dict(zip(shown["holders"]["columns"], shown["holders"]["rows"][0], strict=True))
    assert held["total"] == shown["full_blocks"]
    assert shown["tokens"] == answer.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "text": "a"}, "text"),
    ],
)
async def test_a_chat_that_is_none_names_its_field(
    door: httpx.AsyncClient, body: dict[str, Any], field: str
) -> None:
    answer = await door.post(PREFIX, json=body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, field), answer.text
