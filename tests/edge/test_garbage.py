"""What is left of requests that end with an error: nothing that waits for a garbage collection,
which comes seldom, while each body may have megabytes."""

import asyncio
import gc
import logging
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from app.core.errors import KvrouteError
from tests.door.conftest import completing, replica, until_serving
from tests.door.transfer.test_sources import Engine
from tests.eventually import eventually

APP = (
    str(Path(__file__).parents[2] / "app" / "edge"),
    str(Path(__file__).parents[2] / "app" / "door"),
)


@contextmanager
def kept():
    """Frames of the edge and the door that were in cycles, where each was."""
    found = []
    logging.disable()  # pytest keeps what was logged, and so the errors in it
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += [
            f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            for frame in gc.garbage
            if isinstance(frame, FrameType) and frame.f_code.co_filename.startswith(APP)
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        logging.disable(logging.NOTSET)


async def num_tasks():
    return len(asyncio.all_tasks())


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/route", {"token_ids": "none"}, 422),
        ("/v1/chat/completions", {"model": "none", "messages": []}, 404),
        ("/v1/chat/completions", [], 400),
        ("/v1/completions", {"model": "m", "prompt": [1] * 40}, 502),
    ],
)
async def test_a_request_that_fails_leaves_no_garbage(
    one_redis_server, redis, workers, path, body, status
):
    async with (
        completing(redis, "a", Engine("x").complete) as worker,
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 1)
        # One that is not there, and so fails each request.
        await worker.retire()
        await workers.register("w1", models=("m",))
        await until_serving(door, 1)
        await door.post(path, json=body)
        idle = await num_tasks()
        with kept() as frames:
            answer = await door.post(path, json=body)
            await eventually(num_tasks, lambda number: number <= idle)
        assert answer.status_code == status, answer.text
        assert frames == []


async def test_frames_that_errors_keep_would_be_found():
    """The control."""

    def fail():
        kept_error = None
        try:
            raise KvrouteError("x")
        except KvrouteError as error:
            kept_error = error
        assert kept_error is not None

    code = fail.__code__.replace(co_filename=APP[0] + "/control.py")
    fail.__code__ = code
    with kept() as frames:
        fail()
    assert len(frames) == 1
