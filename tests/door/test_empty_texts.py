import asyncio

import pytest

from tests.door.conftest import MODEL


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ""}),
        ("/v1/embeddings", {"input": ["", "x", ""]}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/messages", {"messages": [{"role": "user", "content": ""}], "max_tokens": 2}),
        ("/v1/rerank", {"query": "", "documents": ["", ""]}),
        ("/tokenize", {"prompt": ""}),
        ("/detokenize", {"tokens": []}),
    ],
)
async def test_empty_texts_that_come_at_once_are_all_answered(door, path, body):
    asked = [door.post(path, json={"model": MODEL, **body}, timeout=30) for _ in range(12)]
    statuses = {answer.status_code for answer in await asyncio.gather(*asked)}
    assert len(statuses) == 1
    assert statuses <= {200, 400, 422}
