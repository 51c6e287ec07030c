import pytest
from click.testing import CliRunner

from loadtest.reuse_multiples import main, reused_share, shared_tokens
from loadtest.traces import Session, Trace, TraceRequest


def test_only_whole_multiples_of_a_shared_prefix_are_reused():
    turns = (
        TraceRequest(0, 1_000, 1, (1, 2, 3), 256),
        TraceRequest(1, 1_300, 1, (1, 2, 3, 4, 5), 256),
        TraceRequest(2, 600, 1, (9, 2, 3), 256),
        TraceRequest(3, 768, 1, (1, 2, 3), 256),
    )
    requests = shared_tokens(Trace("small", (Session(0.0, turns),)))
    # Equal ids after others are other blocks: what they hold depends on all before them.
    assert requests == [(1_000, 0), (1_300, 768), (600, 0), (768, 768)]
    assert reused_share(requests, 256) == pytest.approx((768 + 512) / 3_668)
    assert reused_share(requests, 512) == pytest.approx((512 + 512) / 3_668)
    assert reused_share(requests, 1024) == 0


def test_the_command_shows_the_share_for_each_multiple(tmp_path):
    file = tmp_path / "shares.json"
    done = CliRunner().invoke(main, ["--json", str(file), "--multiple", "256"])
    assert done.exit_code == 0
    assert "256" in done.output
    assert file.exists()
