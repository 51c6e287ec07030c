"""Between which workers KV may travel."""

from dataclasses import replace

import pytest

from app.core.worker_report import as_fingerprint
from app.policy.pairing import group_of, roles_of
from tests.policy.test_view import info

FACTS = {"block": "16", "engine": "vllm 0.32.0", "handshake": "5f0c", "lease": "0"}


def worker(name="", way="nixl", **facts):
    told = as_fingerprint(FACTS | facts)
    return replace(info("a", 8), kv_transfer=way, kv_fingerprint=told, kv_compatible=name)


def are_paired(*infos):
    return roles_of(infos) is not None


def test_equals_are_paired():
    assert are_paired(worker(), worker())
    assert are_paired(worker("a"), worker("a"))


@pytest.mark.parametrize(
    "other",
    [
        *(worker(**{name: "another"}) for name in FACTS),
        *(worker(**{name: ""}) for name in FACTS),
        worker(way="sglang"),
        worker(more="1"),
        worker("a"),
        replace(worker(), revision="new"),
        replace(worker(), kv_fingerprint=()),
    ],
)
def test_no_others_are(other):
    assert not are_paired(worker(), other)
    assert not are_paired(other, worker())


def test_what_is_not_known_is_refused_unless_both_have_one_name():
    silent = worker(handshake="")
    assert group_of(silent) is None
    assert not are_paired(silent, silent)
    named = worker("a", handshake="")
    assert are_paired(named, named)
    assert not are_paired(named, silent)
    assert not are_paired(named, worker("b", handshake=""))
    unheard = replace(worker("a"), kv_fingerprint=())
    assert are_paired(unheard, unheard)


def test_a_rollout_never_mixes_two_revisions():
    old, new = replace(worker("a"), revision="1"), replace(worker("a"), revision="2")
    roles = roles_of([old, new, old, new])
    assert roles is not None
    assert [group.tolist() for group in roles.groups] == [
        [True, False, True, False],
        [False, True, False, True],
    ]


def test_a_name_makes_none_equal_that_differ():
    assert not are_paired(worker("a", block="16"), worker("a", block="32"))


def test_kv_travels_within_each_of_two_groups_as_while_versions_change():
    old, new = worker(), worker(engine="vllm 0.33.0")
    roles = roles_of([old, new, new, old, worker(handshake="")])
    assert roles is not None
    assert [group.tolist() for group in roles.groups] == [
        [True, False, False, True, False],
        [False, True, True, False, False],
    ]
    assert roles.sources.tolist() == [True, True, True, True, False]
