"""Images in prompts count as engines count them."""

import struct
import zlib
from base64 import b64encode

import pytest
from aiohttp import web

from app.tokens.media import USUAL_TOKENS, MediaTokens, media_in, rule_of
from tests.door.conftest import completing, replica, until_serving

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
QWEN = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 14,
    "merge_size": 2,
    "size": {"shortest_edge": 3136, "longest_edge": 1_003_520},
}
QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "merge_size": 2,
    "min_pixels": 65_536,
    "max_pixels": 16_777_216,
}


def png(width, height, num_bytes=100):
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    return b64encode(b"\x89PNG\r\n\x1a\n" + chunk + bytes(num_bytes)).decode()


def jpeg(width, height, thumbnail):
    """With so many bytes before what says its size."""
    before = b"\xff\xe1" + struct.pack(">H", thumbnail + 2) + bytes(thumbnail)
    frame = b"\xff\xc0" + struct.pack(">HBHHB", 11, 8, height, width, 1) + b"\x01\x11\x00"
    return b64encode(b"\xff\xd8" + before + frame + bytes(100)).decode()


def chat(*images, text="what is this?", **detail):
    parts = [{"type": "text", "text": text}]
    for image in images:
        url = image if image.startswith("http") else f"data:image/png;base64,{image}"
        parts.append({"type": "image_url", "image_url": {"url": url, **detail}})
    return {"model": "m", "messages": [{"role": "user", "content": parts}]}


def of_messages(image, *, in_tool_result=False):
    source = {"type": "base64", "media_type": "image/png", "data": image}
    content = [{"type": "image", "source": source}]
    if in_tool_result:
        content = [{"type": "tool_result", "tool_use_id": "t", "content": content}]
    return {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": content}]}


def of_responses(image):
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{image}"}
    return {"model": "m", "input": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    ("preprocessor", "size", "tokens"),
    [  # (width, height), as transformers 5 counts them
        (QWEN, (640, 480), 391),
        (QWEN, (2000, 20), 71),
        (QWEN, (6000, 4000), 1247),
        (QWEN, (8, 8), 4),
        (QWEN3, (1920, 1080), 2040),
        (QWEN3, (150, 100), 70),
    ],
)
def test_an_image_has_as_many_tokens_as_its_processor_makes(preprocessor, size, tokens):
    rule = rule_of(preprocessor, {})
    assert rule is not None
    assert rule(size) == tokens


@pytest.mark.parametrize(
    ("preprocessor", "config", "tokens"),
    [
        ({}, {"mm_tokens_per_image": 256}, 256),
        ({}, {}, None),
        ({"image_processor_type": "CLIPImageProcessor"}, {}, None),
        (QWEN | {"patch_size": "14"}, {}, None),
        (QWEN | {"size": {"longest_edge": -1}}, {}, None),
    ],
)
def test_files_that_tell_no_rule_give_none(preprocessor, config, tokens):
    rule = rule_of(preprocessor, config)
    assert (rule and rule((100, 100))) == tokens


@pytest.mark.parametrize(
    ("body", "sizes"),
    [
        (chat(png(640, 480)), [(640, 480)]),
        (chat(png(640, 480), png(10, 20), detail="low"), [(640, 480), (10, 20)]),
        (chat(jpeg(300, 200, 30_000)), [(300, 200)]),
        (chat("https://example.org/image.png"), [None]),
        (chat(b64encode(b"<svg width='1' height='1'/>").decode()), [None]),
        (chat("no base64!"), [None]),
        (of_messages(png(640, 480)), [(640, 480)]),
        (of_messages(png(640, 480), in_tool_result=True), [(640, 480)]),
        (of_responses(png(640, 480)), [(640, 480)]),
        (chat(), []),
    ],
)
def test_images_are_found_in_all_dialects(body, sizes):
    assert list(media_in([body.get("messages") or body["input"]], 0).sizes) == sizes


def test_what_holds_an_image_is_no_text():
    small = media_in([chat(png(1, 1))["messages"]], 1000 + len(png(1, 1)))
    large = media_in([chat(png(1, 1, 10**6))["messages"]], 1000 + len(png(1, 1, 10**6)))
    assert small.text_tokens == large.text_tokens <= 250


def test_a_mean_is_learned_where_no_rule_is_known():
    counted = MediaTokens()
    two = media_in([chat(png(1, 1), png(9, 9))["messages"]], 400)
    assert counted.of(two, None) == 2 * USUAL_TOKENS
    for _ in range(3):
        counted.learn(two, two.text_tokens + 122)
    assert counted.of(two, None) == 122


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(png(640, 480, 1_200_000))),
        (MESSAGES, of_messages(png(640, 480, 1_200_000))),
        (RESPONSES, of_responses(png(640, 480, 1_200_000))),
    ],
)
async def test_a_large_photo_is_reserved_as_its_engine_counts_it(
    one_redis_server, redis, path, body
):
    reserved = []

    async def complete(_):
        [worker] = (await door.get("/v1/workers")).json()["workers"]
        reserved.append(worker["prefill_tokens"])
        usage = {"prompt_tokens": 81, "completion_tokens": 1, "total_tokens": 82}
        usage |= {"input_tokens": 81, "output_tokens": 1}
        answer = {"choices": [], "content": [], "output": []}  # of any dialect
        return web.json_response(answer | {"usage": usage})

    async with (
        completing(redis, "w", complete, path=path, max_model_len=4096),
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 1)
        for _ in range(2):
            answer = await door.post(path, json=body)
            assert answer.status_code == 200, answer.text
    first, then = reserved
    assert USUAL_TOKENS <= first <= USUAL_TOKENS + 60
    assert abs(then - 81) <= 1
