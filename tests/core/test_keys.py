from __future__ import annotations

import pytest

from app.core.errors import ConfigError
from app.core.keys import Keyspace


def test_a_key_carries_the_version_and_the_namespace_as_hash_tag() -> None:
    assert Keyspace("llama-3.1/70b")["leases"] == "kvroute:1:{llama-3.1/70b}:leases"


def test_members_of_a_family_share_its_prefix() -> None:
    keyspace = Keyspace("default")
    assert keyspace["blocks:"] == "kvroute:1:{default}:blocks:"
    assert keyspace["blocks:"] + "f4" == keyspace["blocks:f4"]


@pytest.mark.parametrize("name", ["a", "0", "Qwen/Qwen3-0.6B", "a" * 128, "x_1.b-2"])
def test_names_of_models_are_namespaces(name: str) -> None:
    assert Keyspace(name).namespace == name


@pytest.mark.parametrize("name", ["", "a b", "{a}", "a}b", "a:b", "-a", "a\n", "é", "a" * 129])
def test_a_name_that_cannot_be_a_hash_tag_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Keyspace(name)
    assert f"namespace {name!r}" in str(refusal.value)
