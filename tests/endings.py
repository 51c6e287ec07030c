"""Recorded endings of requests, in either of the two streams."""

from app.state import decisions


async def all_endings(redis, keyspace):
    """Request id -> how it ended."""
    late = await decisions.read_endings(redis, keyspace, 0, 1000)
    records = [record async for record in decisions.read(redis, keyspace)]
    return {one.request_id: one.ending for one in records if one.ending is not None} | late
