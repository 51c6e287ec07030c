"""What is made of a source's answer: passed on as it is, or not at all."""

import orjson
import pytest

from app.core.types import WorkerKey
from app.core.worker_report import WorkerInfo
from app.door.transfer.nixl import nixl_params
from app.door.transfer.params import BadParams, hosts_of
from app.door.transfer.sources import own_params

NIXL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "0b8f",
    "remote_request_id": "cmpl-1-0",
    "remote_block_ids": [[1, 2]],
    "remote_host": "10.0.0.5",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 40,
    "remote_blocks_expiry_time": None,
    "remote_prefill_cached_tokens": 0,
    "transfer_mode": "pull",
}
OWN = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_host": "10.0.0.5",
    "remote_port": 7000,
    "remote_request_id": "t1",
    "remote_num_tokens": 40,
    "remote_prefill_cached_tokens": 0,
}


def info(address="http://10.0.0.5:8000", *kv_hosts):
    return WorkerInfo(WorkerKey("p"), address, 4, 100, 8, kv_hosts=kv_hosts)


def body(params):
    return orjson.dumps({"choices": [], "kv_transfer_params": params})


def test_what_engines_say_is_passed_on_as_it_is():
    assert nixl_params(body(NIXL), info()) == NIXL
    assert own_params(body(OWN), info()) == OWN
    flat = NIXL | {"remote_block_ids": [1, 2]}  # as before there were groups of layers
    assert nixl_params(body(flat), info()) == flat
    least = {name: NIXL[name] for name in NIXL if name not in ("tp_size", "transfer_mode")}
    assert nixl_params(body(least), info()) == least


@pytest.mark.parametrize("params", [None, {}])
def test_a_source_may_hand_nothing_on(params):
    assert nixl_params(body(params), info()) is None
    assert own_params(b"{}", info()) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("remote_host", []),
        ("remote_host", ""),
        ("remote_host", None),
        ("remote_host", "10.0.0.5\n"),
        ("remote_host", "169.254.169.254"),
        ("remote_host", "localhost"),
        ("remote_host", "10.0.0.5.evil.example"),
        ("remote_port", "5600"),
        ("remote_port", 0),
        ("remote_port", 70000),
        ("remote_port", True),
        ("remote_engine_id", None),
        ("remote_engine_id", "e" * 300),
        ("remote_request_id", {"a": 1}),
        ("remote_block_ids", None),
        ("remote_block_ids", []),
        ("remote_block_ids", [[1], 2]),
        ("remote_block_ids", [[-1]]),
        ("remote_block_ids", [[1.5]]),
        ("remote_block_ids", [["1"]]),
        ("remote_num_tokens", -1),
        ("remote_num_tokens", 2**60),
        ("do_remote_prefill", "yes"),
        ("do_remote_prefill", False),
        ("do_remote_decode", True),
        ("tp_size", "1"),
        ("tp_size", 0),
        ("transfer_mode", "push"),
        ("anything else", {"host": "10.0.0.9"}),
        ("anything else", [1]),
        ("anything else", "x" * 300),
    ],
)
def test_whatever_is_wrong_is_named_and_not_passed_on(name, value):
    with pytest.raises(BadParams, match=name if name in NIXL else "members"):
        nixl_params(body(NIXL | {name: value}), info())


@pytest.mark.parametrize(
    "name", ["remote_host", "remote_port", "remote_engine_id", "remote_request_id"]
)
def test_whatever_is_missing_is_named(name):
    with pytest.raises(BadParams, match=name):
        nixl_params(body({key: value for key, value in NIXL.items() if key != name}), info())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"no JSON",
        b"[]",
        b'"text"',
        b'{"kv_transfer_params": [1]}',
        b'{"kv_transfer_params": "x"}',
    ],
)
def test_an_answer_of_another_shape_is_broken(text):
    with pytest.raises(BadParams):
        own_params(text, info())


def test_hosts_are_those_that_the_source_has_registered():
    assert hosts_of(info()) == {"10.0.0.5"}
    assert hosts_of(info("http://p.svc:8000", "10.1.2.3")) == {"p.svc", "10.1.2.3"}
    assert hosts_of(info("http://127.0.0.1:8000")) == {"127.0.0.1", "::1", "localhost"}
    assert hosts_of(info("http://[fd00::5]:8000")) == {"fd00::5"}
    for host in ("fd00::5", "[fd00::5]"):
        assert nixl_params(body(NIXL | {"remote_host": host}), info("http://[fd00::5]:8000"))
