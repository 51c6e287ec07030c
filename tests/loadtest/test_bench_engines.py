import orjson
import pytest
from click.testing import CliRunner

from loadtest import bench_engines
from loadtest.bench_engines import Conversations, main
from tests.e2e.engines import engine


@pytest.mark.slow
def test_conversations_reuse_what_engines_hold_with_either_policy(tmp_path):
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


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], Conversations(50, 4, 4, 60, 60)),
        (["--device=cuda"], Conversations(128, 4, 32, 2_048, 768)),
        (["--device=cuda", "--turns=2", "--at-once=8"], Conversations(128, 2, 8, 2_048, 768)),
    ],
    ids=str,
)
def test_conversations_fill_what_the_engines_compute_on(arguments, asked, monkeypatch):
    measured = []

    def measure(urls, given, rounds):
        measured.append(given)
        return {"policies": {}}

    monkeypatch.setattr(bench_engines, "measure_with", measure)
    result = CliRunner().invoke(main, ["--engine-url=http://x", *arguments])
    assert result.exit_code == 0, result.output
    assert measured == [asked]


def test_engines_are_needed():
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2
    assert "--engine-url" in result.output
