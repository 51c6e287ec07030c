"""A test that hangs ends, wherever it stands, and says where."""

import subprocess
import sys
from pathlib import Path

HEEDLESS = """
import asyncio, time

async def heedless():
    while True:
        try:
            await asyncio.sleep(60)
        except BaseException:
            pass

async def test_in_a_callback():
    asyncio.get_running_loop().call_soon(time.sleep, 60)
    await heedless()
"""


def test_a_test_that_hangs_ends_with_the_stacks_of_its_tasks(tmp_path):
    file = tmp_path / "test_hanging.py"
    file.write_text(HEEDLESS)
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"),
            *("--timeout=1", "-c", "pyproject.toml", "--rootdir=.", str(file)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[1],
    )
    assert ended.returncode == 1
    assert "::test_in_a_callback has not ended in 1 s" in ended.stderr
    assert "await heedless()" in ended.stderr
    assert "in _run" in ended.stderr
