from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI

from app.core.errors import KvrouteError
from app.core.serving import listen, serve


async def test_an_application_whose_tasks_fail_is_served_no_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
            yield

    async def fail() -> None:
        await asyncio.sleep(0)
        raise LookupError("nobody foresaw this")

    with listen("127.0.0.1", 0) as socket:
        async with asyncio.timeout(5.0):
            with pytest.raises(KvrouteError, match="the application failed"):
                await serve(FastAPI(lifespan=lifespan), socket)
    assert "nobody foresaw this" in caplog.text
