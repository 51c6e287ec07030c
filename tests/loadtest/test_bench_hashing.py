from __future__ import annotations

import re

from click.testing import CliRunner

from loadtest.bench_hashing import main


def test_hashing_a_prompt_is_given_in_calls_of_the_hash_function() -> None:
    done = CliRunner().invoke(main, ["--rounds", "5"])
    assert done.exit_code == 0, done.output
    calls = re.findall(r"^  (.+?) +([\d,]+)$", done.output, re.MULTILINE)
    assert [name for name, _ in calls] == ["raw u32", "numpy array", "list"]
    assert all(int(count.replace(",", "")) > 500 for _, count in calls)
