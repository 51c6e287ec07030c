import orjson
import pytest
from click.testing import CliRunner

from loadtest.bench_engines import Conversations, main, rows
from tests.e2e.engines import engine


@pytest.mark.slow
def test_conversations_reuse_what_engines_hold_with_either_policy(tmp_path):
    file = tmp_path / "found.json"
    sizes = ["--conversations=4", "--turns=3", "--at-once=2", "--seeds=1", f"--json={file}"]
    with engine() as one, engine() as other:
        asked = [f"--engine-url={one.url}", f"--engine-url={other.url}", *sizes]
        result = CliRunner().invoke(main, asked, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = orjson.loads(file.read_bytes())
    for policy in ("round_robin", "latency"):
        assert policy in result.output
        [figures] = found[""][policy]
        assert 0 < figures["cached_share"] < 1
        assert figures["mean_ttft_ms"] > 0


@pytest.mark.parametrize(
    ("device", "sizes", "asked"),
    [
        ("cpu", {"turns": None}, Conversations(50, 4, 4, 60, 60)),
        ("cuda", {}, Conversations(128, 4, 32, 2_048, 768)),
        ("cuda", {"turns": 2, "at_once": 8}, Conversations(128, 2, 8, 2_048, 768)),
    ],
)
def test_conversations_fill_what_the_engines_compute_on(device, sizes, asked):
    [plays] = rows(["http://x"], device, **sizes).values()
    assert {play.args[2] for play in plays.values()} == {asked}


def test_engines_are_needed():
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2
    assert "--engine-url" in result.output
