from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from loadtest.bench_engines import main
from tests.e2e.engines import engine

pytestmark = pytest.mark.slow


def test_conversations_reuse_what_engines_hold_with_either_policy(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    sizes = ["--conversations=4", "--turns=3", "--at-once=2", "--rounds=1", f"--json={file}"]
    with engine() as one, engine() as other:
        asked = [f"--engine-url={one.url}", f"--engine-url={other.url}", *sizes]
        result = CliRunner().invoke(main, asked, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = orjson.loads(file.read_bytes())
    for policy in ("round_robin", "latency"):
        assert policy in result.output
        assert 0 < found["policies"][policy]["cached_share"] < 1
        assert found["policies"][policy]["mean_ttft_ms"] > 0


def test_engines_are_needed() -> None:
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2
    assert "--engine-url" in result.output
