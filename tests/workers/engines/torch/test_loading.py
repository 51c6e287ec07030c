"""Settings of a torch engine, and what it finds on disk after a restart."""

import asyncio
import os
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from app.core.errors import ConfigError
from app.core.hashing import token_bytes
from app.core.settings.worker import WorkerSettings
from app.core.types import Tier
from tests.eventually import eventually
from tests.workers.engines.torch.checkpoints import reference
from tests.workers.kv.cache_model import FakePublisher
from tests.workers.kv.words import named
from workers.engines.base import CompletionRequest
from workers.engines.torch.engine import TorchEngine
from workers.engines.torch.llama import SIZES, Llama
from workers.engines.torch.tiers import fingerprint_of, identity_of, rank_device
from workers.kv.disk_records import _RECORD, PAGE_BYTES
from workers.kv.identity import hash_of, identities_of
from workers.kv.memory import KVShape
from workers.main import host, serve

SETTINGS = WorkerSettings(
    worker_id="w0",
    engine="torch",
    model="tiny",
    device="cpu",
    kv_pool_tokens=1024,
    host_pool_tokens=1024,
)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": "nowhere"}, "model: 'nowhere' is neither a folder"),
        ({"model": "/"}, r"/config\.json: cannot be read"),
        ({"device": "tpu"}, "device: 'tpu'"),
        ({"device": "meta"}, "device: .*'meta'"),
        ({"device": "cuda:99"}, "device: 'cuda:99'"),
        ({"prefill_chunk": 100}, "prefill_chunk: .*100"),
        ({"tp_size": 4}, "tp_size: 4 ranks cannot share 2 KV heads evenly"),
        ({"kv_pool_tokens": 10**30}, "kv_pool_tokens 1000000"),
        ({"host_pool_tokens": 10**15}, "host_pool_tokens 1000000"),
        ({"disk_pool_tokens": 1024}, "disk_pool_tokens .* 1024"),
        ({"disk_folder": "there"}, "disk_folder .*'there'"),
        ({"disk_pool_tokens": 1024, "disk_folder": "/dev/null"}, "disk_folder: '/dev/null'"),
        ({"disk_pool_tokens": 10**18, "disk_folder": "there"}, "disk_pool_tokens 10000000"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_invalid_setting_is_refused_in_one_line_that_names_it(
    changes, complaint, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=complaint) as refused:
        host(replace(SETTINGS, **changes))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("device", "gpu"),
    [
        ("cpu", None),
        pytest.param("cuda", 0, marks=pytest.mark.gpu),
        pytest.param("cuda:0", 0, marks=pytest.mark.gpu),
    ],
)
def test_an_engine_reports_the_gpu_it_computes_on(device, gpu):
    hosted = host(replace(SETTINGS, device=device))
    hosted.close()
    assert hosted.gpu == gpu


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("cuda", 1, ["cuda", "cuda"]),
        ("cuda:1", 2, ["cuda:1", "cuda:1"]),
        ("cpu", 2, ["cpu", "cpu"]),
    ],
)
def test_each_rank_has_a_gpu_if_there_are_as_many_and_none_is_named(
    device, gpus, expected, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    ranks = KVShape(1, 2, 2, torch.float32, 4).split(2)
    assert [str(rank_device(torch.device(device), rank)) for rank in ranks] == expected


def test_a_default_pool_smaller_than_a_block_holds_one_block(monkeypatch):
    monkeypatch.setattr("workers.engines.torch.tiers.DEFAULT_POOL_BYTES", 100)
    hosted = host(replace(SETTINGS, kv_pool_tokens=None, host_pool_tokens=0))
    hosted.close()
    assert hosted.num_blocks == {Tier.DEVICE: 1}


def test_workers_share_a_disk_folder_but_not_a_disk(tmp_path):
    settings = replace(SETTINGS, disk_folder=str(tmp_path), disk_pool_tokens=1024)
    first = host(settings)
    assert first.num_blocks == dict.fromkeys(Tier, 64)
    host(replace(settings, dp_rank=1)).close()
    host(replace(settings, worker_id="w1")).close()
    with pytest.raises(ConfigError, match="in use by another process"):
        host(settings)
    first.close()
    host(settings).close()


async def test_a_worker_that_redis_does_not_suit_gives_its_disk_back(
    tmp_path, one_redis_server, redis
):
    url = one_redis_server.url
    settings = replace(
        SETTINGS, redis_url=url, port=0, disk_folder=str(tmp_path), disk_pool_tokens=1024
    )
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ConfigError, match="allkeys-lru"):
            await serve(settings)
    finally:
        await redis.config_set("maxmemory-policy", "noeviction")
    host(settings).close()


def test_blocks_on_disk_are_not_reused_once_anything_changes_that_decides_their_bits(
    tmp_path, monkeypatch
):
    model = Llama.random(SIZES["tiny"], seed=0, dtype=torch.float32, device="cpu")
    is_now = {"settings": SETTINGS, "shape": model.kv_shape(16), "identity": "tiny"}
    is_now |= {"config": model.config, "device": "cpu", "gpu": "H100", "threads": 1, "release": "1"}

    def fingerprint(**changes):
        now = is_now | changes
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: now["gpu"])
        monkeypatch.setattr(torch, "get_num_threads", lambda: now["threads"])
        monkeypatch.setattr("workers.engines.torch.tiers.version", lambda _: now["release"])
        model.device, model.config = torch.device(now["device"]), now["config"]
        return fingerprint_of(now["settings"], model, now["shape"], now["identity"])

    assert fingerprint(gpu="A100") == fingerprint()
    assert fingerprint(device="cuda") == fingerprint(device="cuda:1")
    others = (
        {"settings": replace(SETTINGS, prefill_chunk=512)},
        {"shape": replace(is_now["shape"], tp_size=2)},
        {"identity": "another"},
        {"threads": 99},
        {"config": replace(model.config, rope_theta=1.0)},
        {"release": "9.9"},
        {"device": "cuda"},
        {"device": "cuda", "gpu": "A100"},
    )
    assert len({fingerprint(), *(fingerprint(**other) for other in others)}) == 1 + len(others)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("")
        before = identity_of(tmp_path)
        os.utime(tmp_path / name, (1, 1))
        assert identity_of(tmp_path) != before


async def test_settings_reach_the_engine(monkeypatch):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    settings = replace(SETTINGS, store_min_uses=3, max_num_seqs=5, threads=2)
    async with serving(settings) as (engine, _):
        assert isinstance(engine, TorchEngine)
        await finished(engine, [1])
        assert threads == [2]
        assert engine._manager.admission.min_uses == 3
        assert engine.metrics().request_total_slots == 5
        # One in eight slots is kept free.
        table = engine._manager.prepare([], 64)
        engine._manager.register(table, [named(n) for n in range(64)])
        engine._cache.release(table)

        async def num_free():
            return engine._manager.tiers[Tier.DEVICE].num_free

        await eventually(num_free, lambda free: free == 8)


@asynccontextmanager
async def serving(settings):
    hosted, publisher = host(settings), FakePublisher()
    engine = hosted.start(publisher)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(engine.run())
            yield engine, publisher
            running.cancel()
    finally:
        hosted.close()


async def finished(engine, prompt, source=None):
    request = CompletionRequest("r", token_bytes(prompt), 1, source=source)
    async for output in engine.complete(request):
        last = output
    assert last.finished is not None
    return last.finished


@pytest.mark.parametrize(
    ("changes", "fetched"),
    [({}, 256), ({"tp_size": 2}, 256), ({"block_size": 32}, 0), ({"prefill_chunk": 128}, 0)],
)
async def test_workers_hand_kv_on_if_they_compute_the_same_bits(changes, fetched):
    settings = replace(SETTINGS, host="127.0.0.1", kv_transfer="kvroute")
    prompt = [n % 251 for n in range(300)]
    async with serving(settings) as (source, _), serving(replace(settings, **changes)) as (at, _):
        assert source.transfers
        await finished(source, prompt)
        kept = await source.hand_on(token_bytes(prompt), 60)
        assert kept is not None
        assert (kept.host, kept.num_tokens) == ("127.0.0.1", 256)
        assert (await finished(at, prompt, kept)).cached_tokens == fetched


async def test_a_worker_hands_nothing_on_unless_it_is_told_to():
    async with serving(SETTINGS) as (engine, _):
        assert not engine.transfers
        await finished(engine, [1] * 300)
        assert await engine.hand_on(token_bytes([1] * 300), 60) is None


def test_models_differ_if_any_weight_does():
    model = Llama.random(SIZES["tiny"], seed=0, dtype=torch.bfloat16, device="cpu")
    before = model.checksum()
    assert (
        before == Llama.random(SIZES["tiny"], seed=0, dtype=torch.bfloat16, device="cpu").checksum()
    )
    dict(model._weights())["model.layers.1.mlp.down_proj.weight"][3, 5] += 1
    assert model.checksum() != before


async def test_each_rank_has_a_disk_of_its_own_and_only_what_all_hold_comes_back(tmp_path):
    prompt = [n % 251 for n in range(600)]
    chain = identities_of(token_bytes(prompt[:512]), 16)
    settings = replace(
        SETTINGS,
        tp_size=2,
        write_policy="through",
        disk_folder=str(tmp_path),
        disk_pool_tokens=1024,
    )
    async with serving(settings) as (engine, publisher):
        await finished(engine, prompt)

        async def tiers():
            return publisher.shown.tiers_of(hash_of(chain[-1]))

        await eventually(tiers, lambda held: held == set(Tier))
    async with serving(settings) as (engine, _):
        assert (await finished(engine, prompt)).disk_tokens == 512
    # As if the worker had been killed before the second rank had stored the second chunk.
    index = tmp_path / "w0:0" / "rank-1" / "index"
    content = bytearray(index.read_bytes())
    records = np.frombuffer(content, _RECORD, offset=PAGE_BYTES)
    records[[block in chain[16:] for block in records["block"].tolist()]] = np.zeros(1, _RECORD)
    index.write_bytes(content)
    async with serving(settings) as (engine, _):
        assert (await finished(engine, prompt)).disk_tokens == 256


async def test_chunk_write_policy_and_disk_settings_take_effect_across_restarts(tmp_path):
    model, prompt = tmp_path / "model", list(range(43))
    reference().save_pretrained(model)
    settings = replace(
        SETTINGS,
        model=str(model),
        block_size=4,
        prefill_chunk=8,
        write_policy="through",
        disk_folder=str(tmp_path / "disks"),
        disk_pool_tokens=1024,
    )
    async with serving(settings) as (engine, publisher):
        await finished(engine, prompt)
        # Five blocks are the same; a chunk is two blocks.
        assert (await finished(engine, [*prompt[:20], *[50] * 10])).cached_tokens == 16

        async def tiers():
            block = identities_of(token_bytes(prompt[:40]), 4)[-1]
            return publisher.shown.tiers_of(hash_of(block))

        await eventually(tiers, lambda held: held == set(Tier))
    async with serving(settings) as (engine, _):
        assert (await finished(engine, prompt)).disk_tokens == 40
    os.utime(model / "model.safetensors")
    async with serving(settings) as (engine, _):
        assert (await finished(engine, prompt)).cached_tokens == 0
