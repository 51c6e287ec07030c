"""A test that hangs ends, wherever it stands, and says where."""

import subprocess
import sys
from pathlib import Path

import pytest

HEEDLESS = """
import asyncio, time

async def heedless():
    while True:
        try:
            await asyncio.sleep(60)
        except BaseException:
            pass

async def test_heedless():
    await heedless()

async def test_in_a_callback():
    asyncio.get_running_loop().call_soon(time.sleep, 60)
    await asyncio.sleep(60)
"""


@pytest.mark.parametrize(
    ("name", "said"), [("test_heedless", "await heedless()"), ("test_in_a_callback", "in _run")]
)
def test_a_test_that_hangs_ends_with_the_stacks_of_its_tasks(tmp_path, name, said):
    file = tmp_path / "test_hanging.py"
    file.write_text(HEEDLESS)
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"),
            *("--timeout=1", "-c", "pyproject.toml", "--rootdir=.", f"{file}::{name}"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[1],
    )
    assert ended.returncode == 1
    assert f"::{name} has not ended in 1 s" in ended.stderr
    assert said in ended.stderr
