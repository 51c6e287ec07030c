"""Checks of a source's answer, which says where a prompt's KV lies, before the target is told of
it.

The target connects to the host and port in it, so they are the source's own. Whatever else is wrong
with it would be refused there as a fault of the client's, or never come to an end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import orjson

from app.core.errors import shown
from app.core.worker_report import WorkerInfo
from app.door.answer_request import TRANSFER

MAX_TEXT = 255
MAX_NUMBER = 2**53
MAX_BLOCKS = 1 << 20
MAX_OTHERS = 64
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

Params = dict[str, Any]
Checks = dict[str, tuple[Callable[[object], bool], str]]
"""Check of each needed member, and what it should be."""


class BadParams(ValueError):
    """A source's answer of which no worker could make anything."""


def hosts_of(source: WorkerInfo) -> frozenset[str]:
    """Returns the hosts at which a source's KV may lie, as it has registered."""
    hosts = {urlsplit(source.address).hostname or "", *source.kv_hosts} - {""}
    return frozenset(hosts | LOOPBACK if hosts & LOOPBACK else hosts)


def params_in(body: bytes, source: WorkerInfo, needed: Checks) -> Params | None:
    """Returns the params in a source's answer; None if it hands nothing on. Raises BadParams."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise BadParams("its answer is not JSON") from None
    if not isinstance(answer, dict):
        raise BadParams(f"its answer is {shown(answer)}, not an object")
    params = answer.get(TRANSFER)
    if params is None or params == {}:
        return None
    if not isinstance(params, dict):
        raise BadParams(f"{TRANSFER} is {shown(params)}, not an object")
    for name, (is_right, wanted) in needed.items():
        if not is_right(params.get(name)):
            raise BadParams(f"{TRANSFER}.{name} is {shown(params.get(name))}, not {wanted}")
    if params["remote_host"].strip("[]").lower() not in hosts_of(source):
        raise BadParams(
            f"{TRANSFER}.remote_host is {shown(params['remote_host'])}, which is no host of its "
            "own: see --kv-host of its agent"
        )
    others = {name: value for name, value in params.items() if name not in needed}
    if len(others) > MAX_OTHERS or not all(_is_plain(value) for value in others.values()):
        raise BadParams(f"{TRANSFER} has members that no engine sends")
    return params


def _is_plain(value: object) -> bool:
    return (
        value is None
        or isinstance(value, (bool, float))
        or (isinstance(value, int) and abs(value) <= MAX_NUMBER)
        or (isinstance(value, str) and len(value) <= MAX_TEXT)
    )


def is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()


def is_port(value: object) -> bool:
    return type(value) is int and 0 < value <= 65535


def is_count(value: object) -> bool:
    return type(value) is int and 0 < value <= MAX_NUMBER


def is_count_or_none(value: object) -> bool:
    return value is None or is_count(value)


def are_blocks(value: object) -> bool:
    """Whether a value is numbers of blocks, or a list of them for each group of layers."""
    if not isinstance(value, list) or not value:
        return False
    groups = value if all(isinstance(group, list) for group in value) else [value]
    return sum(map(len, groups)) <= MAX_BLOCKS and all(
        type(block) is int and 0 <= block <= MAX_NUMBER for group in groups for block in group
    )


COMMON: Checks = {
    "do_remote_prefill": (lambda value: value is True, "true"),
    "do_remote_decode": (lambda value: value is None or value is False, "false"),
    "remote_host": (is_text, "a host"),
    "remote_port": (is_port, "a port"),
    "remote_request_id": (is_text, "a short text"),
    "remote_num_tokens": (is_count, "a number of tokens"),
}
"""Checks of what both vLLM's engines and ours say."""
