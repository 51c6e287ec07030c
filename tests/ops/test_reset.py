"""`kvroute reset` deletes one namespace."""

from tests.ops.conftest import kvroute


def test_a_reset_asks_and_deletes_only_its_own_namespace(url, raw):
    others = ["kvroute:1:{tes}:meta", "kvroute:1:{test2#0}:shard", "test", "kvroute:1:{a/test}:x"]
    for other in others:
        raw.set(other, "mine")
    keys = raw.dbsize() - len(others)
    refused = kvroute(url, "reset", input="n\n")
    assert f"Delete {keys} keys of namespace 'test'?" in refused.output
    assert refused.exit_code == 1
    assert raw.dbsize() == keys + len(others)
    assert kvroute(url, "reset", input="y\n").exit_code == 0
    assert sorted(key.decode() for key in raw.scan_iter()) == sorted(others)
