"""Connections to Redis."""

from __future__ import annotations

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from app.core.errors import ConfigError


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
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except (ValueError, RedisError) as error:
        raise ConfigError(f"REDIS_URL {url!r}: {error}") from None
    return Redis(connection_pool=pool)
