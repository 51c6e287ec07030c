"""Which settings of a torch engine are refused, by name, and what of it a restart brings back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.core.config import WorkerSettings
from app.core.errors import ConfigError
from app.core.types import Tier
from workers.engines.hosting import host

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
        ({"model": "nowhere"}, "model: 'nowhere' is no folder"),
        ({"model": "/"}, r"/config\.json: cannot be read"),
        ({"device": "tpu"}, "device: 'tpu'"),
        ({"device": "meta"}, "device: .*'meta'"),
        ({"device": "cuda:99"}, "device: 'cuda:99'"),
        ({"prefill_chunk": 100}, "prefill_chunk: .*100"),
        ({"kv_pool_tokens": 15}, "kv_pool_tokens: .*15"),
        ({"kv_pool_tokens": 10**30}, "kv_pool_tokens 1000000"),
        ({"host_pool_tokens": 15}, "host_pool_tokens: .*15"),
        ({"host_pool_tokens": 10**15}, "host_pool_tokens 1000000"),
        ({"disk_pool_tokens": 15, "disk_folder": "there"}, "disk_pool_tokens: .*15"),
        ({"disk_pool_tokens": 1024}, "disk_pool_tokens .* 1024"),
        ({"disk_folder": "there"}, "disk_folder .*'there'"),
        ({"disk_pool_tokens": 1024, "disk_folder": "/dev/null"}, "disk_folder: '/dev/null'"),
        ({"disk_pool_tokens": 10**18, "disk_folder": "there"}, "disk_pool_tokens 10000000"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_that_cannot_be_had_is_refused_in_one_line_that_names_it(
    changes: dict[str, Any], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=complaint) as refused:
        host(replace(SETTINGS, **changes))
    assert "\n" not in str(refused.value)


def test_workers_share_a_folder_for_disks_but_no_disk(tmp_path: Path) -> None:
    settings = replace(SETTINGS, disk_folder=str(tmp_path), disk_pool_tokens=1024)
    first = host(settings)
    assert first.num_blocks == dict.fromkeys(Tier, 64)
    host(replace(settings, dp_rank=1)).close()
    host(replace(settings, worker_id="w1")).close()
    with pytest.raises(ConfigError, match="another process uses it"):
        host(settings)
    first.close()
    host(settings).close()
