"""Fingerprint of what must be equal between two engines for the KV of one to be right in the
other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
import zmq
import zmq.asyncio

from app.core.worker_report import UNKNOWN, as_fingerprint
from workers.bridge.http.facts import EngineFacts

HANDSHAKE_S = 2.0
MAX_HANDSHAKE_BYTES = 64 * 1024 * 1024
_ASKED = msgspec.msgpack.encode((b"get_meta_msg", 0, 0))
"""Question for pipeline and tensor rank 0, which each engine has: asked for one that it has not, it
would hand on nothing any more."""


class _Payload(msgspec.Struct):
    """NixlHandshakePayload of vllm/distributed/kv_transfer/kv_connector/v1/nixl/metadata.py.

    compatibility_hash: of versions, model, dtypes, heads, layers and the like.
    """

    compatibility_hash: str
    agent_metadata_bytes: bytes


class _Metadata(msgspec.Struct):
    """NixlAgentMetadata of the same file. The hash does not cover these fields."""

    block_size: int | str = UNKNOWN
    kv_cache_layout: str = UNKNOWN
    physical_blocks_per_logical_kv_block: int = 1
    dcp_size: int = 1
    pcp_size: int = 1


_PAYLOAD = msgspec.msgpack.Decoder(_Payload)
_METADATA = msgspec.msgpack.Decoder(_Metadata)


async def of_vllm(
    context: zmq.asyncio.Context, facts: EngineFacts, hosts: Iterable[str], port: int
) -> tuple[str, ...]:
    """Returns a fingerprint for WorkerInfo. hosts: where the engine's side channel may be."""
    told, about = UNKNOWN, _Metadata()
    for host in hosts:
        payload = await _handshake(context, f"tcp://{host}:{port}")
        if payload is not None:
            told, about = payload.compatibility_hash[:16], _read(payload.agent_metadata_bytes)
            break
    return as_fingerprint(
        {
            **_of_engine(facts),
            "connector": "nixl",
            "transfer-block": f"{about.block_size}/{about.physical_blocks_per_logical_kv_block}",
            "layout": about.kv_cache_layout,
            "context-parallel": f"{about.dcp_size}/{about.pcp_size}",
            "handshake": told,
        }
    )


def of_sglang(facts: EngineFacts) -> tuple[str, ...]:
    return as_fingerprint(_of_engine(facts) | dict(facts.kv_settings))


def _of_engine(facts: EngineFacts) -> dict[str, str]:
    return {
        "engine": f"{facts.kind} {facts.version}",
        "model": facts.tokenizer or facts.models[0],
        "block": str(facts.block_size),
        "kv-dtype": facts.kv_dtype,
    }


async def _handshake(context: zmq.asyncio.Context, address: str) -> _Payload | None:
    """Returns what the engine answers to one that is about to fetch from it; None: nothing."""
    with context.socket(zmq.REQ) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.setsockopt(zmq.MAXMSGSIZE, MAX_HANDSHAKE_BYTES)
        try:
            asking.connect(address)
            async with asyncio.timeout(HANDSHAKE_S):
                await asking.send(_ASKED)
                answer, *_ = await asking.recv_multipart()
            return _PAYLOAD.decode(answer)
        except (TimeoutError, zmq.ZMQError, msgspec.DecodeError):
            return None


def _read(metadata: bytes) -> _Metadata:
    try:
        return _METADATA.decode(metadata)
    except msgspec.DecodeError:
        return _Metadata(block_size=UNKNOWN)
