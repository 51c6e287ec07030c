"""Engines of which only what they say to GETs matters."""

from contextlib import asynccontextmanager

import aiohttp

from tests.fakes.engine import fake_engine
from workers.bridge.http.engine import EngineHttp


@asynccontextmanager
async def serving(answers):
    """A session, and the URL of an engine that gives `answers`: it may be changed meanwhile."""
    async with fake_engine(says=answers) as engine, aiohttp.ClientSession() as session:
        yield session, engine.url


@asynccontextmanager
async def engine_of(answers):
    async with serving(answers) as (session, url):
        yield EngineHttp(session, url)
