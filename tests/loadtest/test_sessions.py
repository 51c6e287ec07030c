"""Made-up sessions are traces that can be read, the same each time."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from loadtest.sessions import TRACES, main
from loadtest.traces import read_trace


@pytest.mark.parametrize("name", TRACES)
def test_made_up_sessions_can_be_read_and_are_the_same_each_time(name: str, tmp_path: Path) -> None:
    first, second = (CliRunner().invoke(main, [name], catch_exceptions=False) for _ in range(2))
    assert first.stdout_bytes == second.stdout_bytes
    file = tmp_path / "trace.jsonl"
    file.write_bytes(first.stdout_bytes)
    trace = read_trace(file)
    assert len(trace.sessions) == sum(kind.number for kind in TRACES[name])
    assert trace.num_requests > 2 * len(trace.sessions)
    for session in trace.sessions:
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            assert (
                after.blocks[: before.input_tokens // 256]
                == before.blocks[: before.input_tokens // 256]
            )


def test_sessions_share_their_system_prompt_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(CliRunner().invoke(main, ["mixed"], catch_exceptions=False).stdout_bytes)
    prompts = [set(session.turns[-1].blocks) for session in read_trace(file).sessions[:20]]
    shared = {len(one & other) for one in prompts for other in prompts if one is not other}
    assert shared <= {0, 2, 16}
