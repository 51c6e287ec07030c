"""Connections to Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from app.core.errors import ConfigError, RedisUnavailable


def connect(url: str, *, max_connections: int = 16, timeout_s: float = 2.0) -> Redis:
    """A client of the Redis at `url` (redis://, rediss:// or unix://); it connects when first used.

    timeout_s bounds connecting and waiting for a free connection; a caller's own deadline bounds
    the rest. Once over, a command is not sent again behind the caller's back.
    Raises ConfigError for a URL that is none.
    """
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # The client's own deadline is asyncio.wait_for, which may swallow a cancellation on
            # Python 3.11; it would have one of 5 s by default.
            socket_timeout=None,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except (ValueError, RedisError) as error:
        raise ConfigError(f"REDIS_URL {url!r}: {error}") from None
    return Redis.from_pool(pool)


@asynccontextmanager
async def deadline(timeout_s: float) -> AsyncIterator[None]:
    """Bounds the Redis commands inside. Raises RedisUnavailable for whatever becomes of them."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise RedisUnavailable(f"no answer within {timeout_s * 1000:.0f} ms") from None
    except (RedisError, OSError) as error:
        raise RedisUnavailable(f"{type(error).__name__}: {error}") from error
