import pytest

from app.core.errors import ConfigError
from app.core.keys import Keyspace


def test_a_key_carries_the_version_and_the_namespace_as_hash_tag():
    assert Keyspace("llama-3.1/70b")["leases"] == "kvroute:1:{llama-3.1/70b}:leases"


def test_members_of_a_family_share_its_prefix():
    keyspace = Keyspace("default")
    assert keyspace["blocks:"] == "kvroute:1:{default}:blocks:"
    assert keyspace["blocks:"] + "f4" == keyspace["blocks:f4"]


@pytest.mark.parametrize("name", ["a", "0", "Qwen/Qwen3-0.6B", "a" * 128, "x_1.b-2"])
def test_a_model_name_is_a_valid_namespace(name):
    assert Keyspace(name).namespace == name


@pytest.mark.parametrize("name", ["", "a b", "{a}", "a}b", "a:b", "-a", "a\n", "é", "a" * 129])
def test_a_name_that_cannot_be_a_hash_tag_is_refused(name):
    with pytest.raises(ConfigError) as refusal:
        Keyspace(name)
    assert f"namespace {name!r}" in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "parsed"),
    [
        ("kvroute:1:{a/b}:leases", (None, "leases")),
        ("kvroute:1:{a/b}:requests:7", (None, "requests:7")),
        ("kvroute:1:{a/b#0}:shard", (0, "shard")),
        ("kvroute:1:{a/b#12}:blocks:f4:x\n", (12, "blocks:f4:x\n")),
        ("kvroute:1:{a/bc}:leases", None),
        ("kvroute:1:{a/b#x}:shard", None),
        ("kvroute:1:{a/b#}:shard", None),
        ("kvroute:2:{a/b}:leases", None),
        ("x:kvroute:1:{a/b}:leases", None),
        ("kvroute:1:{a/b}", None),
    ],
)
def test_a_key_is_parsed_into_its_shard_and_name(key, parsed):
    assert Keyspace("a/b").parse(key.encode()) == parsed
    if parsed:
        shard, name = parsed
        assert Keyspace("a/b", shard)[name] == key


def test_a_key_that_is_not_text_is_parsed_too():
    assert Keyspace("a").parse(b"kvroute:1:{a}:mine\xff") == (None, "mine\ufffd")


async def test_a_scan_finds_only_the_keys_of_a_namespace_and_its_shards(redis):
    keyspace = Keyspace("a.b/c_d-e")
    own = {keyspace["leases"], keyspace.of_shard(0)["shard"], keyspace.of_shard(17)["blocks:f4"]}
    others = {Keyspace("a.b/c_d-e2")["leases"], Keyspace("axb/c_d-e")["leases"]}
    await redis.mset(dict.fromkeys(own | others, "x"))
    _, found = await redis.scan(0, keyspace.pattern, 100)
    assert {key.decode() for key in found} == own
