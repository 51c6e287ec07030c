import os

import pytest

from app.core.types import Tier, TierOverlap, WorkerKey, new_id


def test_a_worker_key_is_written_with_its_rank():
    assert str(WorkerKey("gpu-7", 3)) == "gpu-7:3"
    assert str(WorkerKey("gpu-7")) == "gpu-7:0"


@pytest.mark.parametrize(
    "key", [WorkerKey("a"), WorkerKey("node.1_x-2", 12), WorkerKey("7", 65535)]
)
def test_a_worker_key_is_read_as_it_was_written(key):
    assert WorkerKey.parse(str(key)) == key


@pytest.mark.parametrize(
    "text", ["", "a", "a:", ":0", "a:b", "a:-1", "a b:0", "a:0:0x", "a:123456", "-a:0", "a:0\n"]
)
def test_text_that_is_not_a_worker_key_is_refused_and_quoted(text):
    with pytest.raises(ValueError, match="not a worker key") as refusal:
        WorkerKey.parse(text)
    assert repr(text) in str(refusal.value)


def test_an_overlap_totals_its_tiers():
    assert TierOverlap(device=4, host=2, disk=1).total == 7
    assert TierOverlap().total == 0


def test_a_slower_tier_compares_as_larger():
    assert max(Tier.DEVICE, Tier.HOST) is Tier.HOST
    assert max(Tier.HOST, Tier.DISK) is Tier.DISK


def test_a_child_process_draws_other_ids_than_its_parent():
    drawn = [new_id() for _ in range(600)]
    assert {len(each) for each in drawn} == {32}
    assert len(set(drawn)) == 600
    new_id()  # so that something drawn ahead is left
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, new_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 100).decode() != new_id()
    os.close(read_end)
    os.close(write_end)
