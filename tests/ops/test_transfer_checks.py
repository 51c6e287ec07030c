from dataclasses import replace

import pytest

from app.core.roles import Role
from app.ops.worker_checks import of_transfers
from tests.fake_worker import worker_info

ALIKE = ("block=16", "engine=vllm 0.32.0", "handshake=5f0c")
NIXL = replace(worker_info("a"), kv_transfer="nixl", kv_fingerprint=ALIKE)
PREFILL = replace(NIXL, role=Role.PREFILL)
DECODE = replace(NIXL, role=Role.DECODE)
OWN = replace(NIXL, kv_transfer="kvroute")


def bad(*infos):
    return {check.about for check in of_transfers(infos) if check.ok is False}


@pytest.mark.parametrize(
    ("infos", "wrong"),
    [
        ([worker_info("a"), worker_info("b")], set()),
        ([NIXL, NIXL], set()),
        ([PREFILL, DECODE], set()),
        ([PREFILL, NIXL], set()),
        ([NIXL, worker_info("b")], {"kv transfer"}),
        ([NIXL, NIXL, OWN], {"kv transfer"}),
        ([PREFILL, PREFILL], {"roles"}),
        ([DECODE, DECODE], {"roles"}),
        (
            [PREFILL, replace(DECODE, kv_fingerprint=ALIKE[:2])],
            {"kv transfer pairs"},
        ),
        ([PREFILL, replace(DECODE, kv_fingerprint=())], {"kv transfer pairs"}),
        ([PREFILL, replace(DECODE, kv_lease_s=120.0)], set()),
        ([replace(PREFILL, kv_lease_s=30.0), DECODE], set()),
        ([replace(OWN, kv_lease_s=30.0), replace(OWN, kv_lease_s=30.0)], set()),
    ],
)
def test_what_keeps_kv_from_travelling_is_told(infos, wrong):
    assert bad(*infos) == wrong


def test_what_engines_do_not_tell_is_said_to_be_unknown():
    unknown = {check.about: check for check in of_transfers([NIXL, NIXL]) if check.ok is None}
    assert list(unknown) == ["kv transfer settings"]
    for word in ("recompute", "side channel"):
        assert word in unknown["kv transfer settings"].found
    assert all(check.ok is not None for check in of_transfers([OWN, OWN]))


@pytest.mark.parametrize(("infos", "role"), [([PREFILL] * 2, "decode"), ([DECODE] * 2, "prefill")])
def test_the_missing_half_is_named(infos, role):
    [check] = [check for check in of_transfers(infos) if check.ok is False]
    assert f"--role {role}" in check.remedy


def test_leases_are_told():
    told = [replace(OWN, kv_lease_s=seconds) for seconds in (30.0, 60.0, 30.0)]
    [check] = [check for check in of_transfers(told) if check.about == "kv transfer lease"]
    assert check.ok
    assert check.found == "30 s (2), 60 s (1), for sure"


def test_what_differs_is_named_and_who_says_what():
    longer = replace(worker_info("b"), kv_transfer="nixl", kv_fingerprint=("block=32", *ALIKE[1:]))
    [check] = [check for check in of_transfers([NIXL, longer]) if check.ok is False]
    assert check.found == "block: 16 (a:0), 32 (b:0)"


def test_what_an_engine_does_not_tell_is_named():
    told = (*ALIKE[:2], "handshake=?")
    silent = replace(worker_info("b"), kv_transfer="nixl", kv_fingerprint=told)
    [check] = [check for check in of_transfers([silent, silent]) if check.ok is False]
    assert check.found == "b:0 does not tell its handshake"
    named = replace(silent, kv_compatible="a")
    assert bad(named, named) == set()
