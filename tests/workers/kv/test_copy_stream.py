from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.kv.pools import NUM_BLOCKS, SMALL, WIDE, moved, pool_of
from workers.kv.copiers import COPIERS
from workers.kv.copy_stream import CopyStream, copy_stream
from workers.kv.memory import Ids, MemoryPool, host_pool


@contextmanager
def streaming(source: MemoryPool, target: MemoryPool) -> Iterator[CopyStream]:
    with closing(copy_stream(source, target)) as stream:
        yield stream


def test_layers_are_copied_in_groups_of_at_least_64_kib_a_block() -> None:
    with streaming(pool_of(WIDE, 1), pool_of(WIDE, 2)) as stream:
        assert (stream.layers_per_group, stream.num_groups) == (2, 3)
        assert [stream.group_of(layer) for layer in range(5)] == [0, 0, 1, 1, 2]
    with streaming(pool_of(SMALL, 1), pool_of(SMALL, 2)) as stream:
        assert (stream.layers_per_group, stream.num_groups) == (3, 1)


def test_a_stream_copies_triggered_groups_and_can_be_triggered_again() -> None:
    source, target = pool_of(WIDE, 1), pool_of(WIDE, 2)
    source_ids, target_ids = [7, 2, 9], [3, 11, 0]
    with streaming(source, target) as stream:
        stream.prepare(source_ids, target_ids)
        before = target.words.clone()
        after = moved(source.words, before, source_ids, target_ids)
        stream.trigger_layer(3)
        stream.wait_layer(2)
        assert torch.equal(target.words[:, 2:4], after[:, 2:4])
        assert torch.equal(target.words[:, :2], before[:, :2])
        source.words[:, 2:4].random_()  # already copied, so not copied again below
        stream.trigger_group(0)
        stream.trigger_all()
        for layer in range(5):
            stream.wait_layer(layer)
            assert torch.equal(target.words[:, layer], after[:, layer])
        stream.wait()
        assert torch.equal(target.words, after)

        source.words.random_()
        stream.trigger_all()
        stream.wait()
        assert torch.equal(target.words, moved(source.words, after, source_ids, target_ids))

        stream.prepare([1], [8])
        stream.trigger_all()
        stream.wait()
        assert torch.equal(target.words[8], source.words[1])


def test_a_stream_refuses_invalid_calls() -> None:
    with streaming(pool_of(WIDE, 1), pool_of(WIDE, 2)) as stream:
        with pytest.raises(ValueError, match="block 12 is not in a pool of 12 blocks"):
            stream.prepare([0], [12])
        stream.prepare([0], [1])
        for layer in (-1, 5):
            with pytest.raises(ValueError, match=f"layer {layer} of 5"):
                stream.trigger_layer(layer)
        for group in (-1, 3):
            with pytest.raises(ValueError, match=f"group {group} of 3"):
                stream.trigger_group(group)
        with pytest.raises(ValueError, match="layer 0 was not triggered"):
            stream.wait_layer(0)
        stream.trigger_layer(0)
        with pytest.raises(ValueError, match="were triggered but not waited for"):
            stream.prepare([0], [2])
        stream.wait()
        stream.prepare([0], [2])


def test_waiting_for_a_failed_copy_raises_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Tensor, target: Tensor, source_ids: Ids, target_ids: Ids) -> None:
        raise OSError("no such memory")

    with streaming(pool_of(WIDE, 1), pool_of(WIDE, 2)) as stream:
        stream.prepare([0], [1])
        with monkeypatch.context() as patched:
            for name in COPIERS:
                patched.setitem(COPIERS, name, fail)
            stream.trigger_all()
            with pytest.raises(OSError, match="no such memory"):
                stream.wait_layer(4)
            with pytest.raises(OSError, match="no such memory"):
                stream.wait()
        stream.trigger_all()
        stream.wait()


def test_a_stream_raises_an_error_only_after_all_its_copies_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Callers that see the error may reuse the blocks."""
    reported, num_ended = threading.Event(), 0

    def fail(*_: Any) -> None:
        nonlocal num_ended
        reported.wait(0.1)
        num_ended += 1
        raise OSError("no such memory")

    stream = copy_stream(pool_of(WIDE, 1), pool_of(WIDE, 2))
    for name in COPIERS:
        monkeypatch.setitem(COPIERS, name, fail)
    stream.prepare([0], [1])
    stream.trigger_all()
    with pytest.raises(OSError, match="no such memory"):
        stream.wait()
    assert num_ended == stream.num_groups
    reported.set()
    stream.trigger_all()
    with pytest.raises(OSError, match="no such memory"):
        stream.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        stream.trigger_all()


@pytest.mark.gpu
@pytest.mark.parametrize("upwards", [True, False])
def test_on_cuda_each_layer_can_be_used_while_later_ones_are_copied(upwards: bool) -> None:
    pools = host_pool(WIDE, NUM_BLOCKS), MemoryPool(WIDE, NUM_BLOCKS, "cuda")
    source, target = pools if upwards else pools[::-1]
    source.words.random_()
    with streaming(source, target) as stream:
        stream.prepare([7, 2, 9], [3, 11, 0])
        stream.trigger_all()
        for layer in range(WIDE.num_layers):
            stream.wait_layer(layer)
            torch.cuda.current_stream().synchronize()
            assert torch.equal(
                target.words[[3, 11, 0], layer].cpu(), source.words[[7, 2, 9], layer].cpu()
            )
        stream.wait()
