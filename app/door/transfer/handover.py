"""What a source answers of where a prompt's KV lies, looked at before the target is told of it.

The target connects to the host and port in it, so they are the source's own. Whatever else is
wrong with it would be refused there as a fault of the client's, or never come to an end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import orjson

from app.core.errors import shown
from app.core.worker_report import WorkerInfo
from app.door.engines import TRANSFER

MAX_TEXT = 255
MAX_NUMBER = 2**53
MAX_BLOCKS = 1 << 20
MAX_OTHERS = 64
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

Params = dict[str, Any]


class BrokenHandover(ValueError):
    """A source's answer of which no worker could make anything."""


def nixl_params(body: bytes, source: WorkerInfo) -> Params | None:
    """What vLLM's NixlConnector says; None: it hands nothing on. Raises BrokenHandover."""
    return _params(body, source, _OF_NIXL)


def own_params(body: bytes, source: WorkerInfo) -> Params | None:
    """The same of our own engines."""
    return _params(body, source, _OF_OWN)


def hosts_of(source: WorkerInfo) -> frozenset[str]:
    """Where its KV may lie, as far as it has registered."""
    hosts = {urlsplit(source.address).hostname or "", *source.kv_hosts} - {""}
    return frozenset(hosts | LOOPBACK if hosts & LOOPBACK else hosts)


def _params(body: bytes, source: WorkerInfo, needed: _Checks) -> Params | None:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise BrokenHandover("its answer is not JSON") from None
    if not isinstance(answer, dict):
        raise BrokenHandover(f"its answer is {shown(answer)}, not an object")
    params = answer.get(TRANSFER)
    if params is None or params == {}:
        return None
    if not isinstance(params, dict):
        raise BrokenHandover(f"{TRANSFER} is {shown(params)}, not an object")
    for name, (is_right, wanted) in needed.items():
        if not is_right(params.get(name)):
            raise BrokenHandover(f"{TRANSFER}.{name} is {shown(params.get(name))}, not {wanted}")
    if params["remote_host"].strip("[]").lower() not in hosts_of(source):
        raise BrokenHandover(
            f"{TRANSFER}.remote_host is {shown(params['remote_host'])}, which is no host of its "
            "own: see --kv-host of its agent"
        )
    others = {name: value for name, value in params.items() if name not in needed}
    if len(others) > MAX_OTHERS or not all(_is_plain(value) for value in others.values()):
        raise BrokenHandover(f"{TRANSFER} has members that no engine sends")
    return params


def _is_plain(value: object) -> bool:
    return (
        value is None
        or isinstance(value, (bool, float))
        or (isinstance(value, int) and abs(value) <= MAX_NUMBER)
        or (isinstance(value, str) and len(value) <= MAX_TEXT)
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()


def _is_port(value: object) -> bool:
    return type(value) is int and 0 < value <= 65535


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value <= MAX_NUMBER


def _is_count_or_none(value: object) -> bool:
    return value is None or _is_count(value)


def _are_blocks(value: object) -> bool:
    """Numbers of blocks, or a list of them for each group of layers."""
    if not isinstance(value, list) or not value:
        return False
    groups = value if all(isinstance(group, list) for group in value) else [value]
    return sum(map(len, groups)) <= MAX_BLOCKS and all(
        type(block) is int and 0 <= block <= MAX_NUMBER for group in groups for block in group
    )


_Checks = Mapping[str, tuple[Callable[[object], bool], str]]
"""For each member that is needed: whether it is right, and what it should be."""
_OF_OWN: dict[str, tuple[Callable[[object], bool], str]] = {
    "do_remote_prefill": (lambda value: value is True, "true"),
    "do_remote_decode": (lambda value: value is None or value is False, "false"),
    "remote_host": (_is_text, "a host"),
    "remote_port": (_is_port, "a port"),
    "remote_request_id": (_is_text, "a short text"),
    "remote_num_tokens": (_is_count, "a number of tokens"),
}
_OF_NIXL: _Checks = _OF_OWN | {
    "remote_num_tokens": (_is_count_or_none, "a number of tokens"),
    "remote_engine_id": (_is_text, "a short text"),
    "remote_block_ids": (_are_blocks, "numbers of blocks"),
    "tp_size": (_is_count_or_none, "a number of shards"),
    "transfer_mode": (lambda value: value in (None, "pull"), "pull"),
}
