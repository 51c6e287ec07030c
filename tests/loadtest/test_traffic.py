from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from loadtest.traces import Trace, read_trace
from loadtest.traffic import TRAFFIC, main


def made(name: str, folder: Path) -> Trace:
    result = CliRunner().invoke(main, [name], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (folder / "made.jsonl").write_text(result.output)
    return read_trace(folder / "made.jsonl")


@pytest.mark.parametrize("name", [name for name in TRAFFIC if name != "short"])
def test_each_kind_is_a_trace_of_requests_that_a_worker_can_hold(name: str, tmp_path: Path) -> None:
    trace = made(name, tmp_path)
    assert trace.num_requests >= 400
    for session in trace.sessions:
        (turn,) = session.turns
        assert turn.input_tokens + turn.output_tokens < 400_000
        assert len(turn.blocks) * turn.block_tokens <= turn.input_tokens


def test_sub_agents_come_eight_at_once_on_a_prompt_of_their_own(tmp_path: Path) -> None:
    trace = made("sub-agents", tmp_path)
    together = Counter((session.start_s, session.turns[0].blocks) for session in trace.sessions)
    assert set(together.values()) == {8}
    assert len({blocks for _, blocks in together}) == len(together)


def test_a_crowd_comes_within_two_seconds_on_a_prefix_of_its_own(tmp_path: Path) -> None:
    trace = made("crowd", tmp_path)
    crowds: dict[int, list[float]] = {}
    for session in trace.sessions:
        if session.turns[0].priority == "low":
            crowds.setdefault(session.turns[0].blocks[0], []).append(session.start_s)
    assert [len(starts_s) for starts_s in crowds.values()] == [200] * 3
    assert all(max(starts_s) - min(starts_s) <= 2.0 for starts_s in crowds.values())
