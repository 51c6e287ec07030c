"""Engines of which only what they say to GETs matters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from tests.fakes.engine import fake_engine
from tests.fakes.facts import Answers
from workers.bridge.http.engine import EngineHttp


@asynccontextmanager
async def serving(answers: Answers) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A session, and the URL of an engine that gives `answers`: it may be changed meanwhile."""
    async with fake_engine(says=answers) as engine, aiohttp.ClientSession() as session:
        yield session, engine.url


@asynccontextmanager
async def engine_of(answers: Answers) -> AsyncIterator[EngineHttp]:
    async with serving(answers) as (session, url):
        yield EngineHttp(session, url)
