"""What is installed with which extra, and what the wheel has in it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def needs_torch(extra: str) -> bool:
    """Whether an extra installs torch, itself or by others of ours."""
    ours = re.findall(r"kvroute\[([\w,]+)\]", " ".join(EXTRAS[extra]))
    others = [name for names in ours for name in names.split(",")]
    return any(re.match(r"torch\b", need) for need in EXTRAS[extra]) or any(
        map(needs_torch, others)
    )


def test_torch_is_installed_for_the_torch_engine_and_for_the_tests_alone() -> None:
    assert {extra for extra in EXTRAS if needs_torch(extra)} == {"torch", "dev"}


def test_the_demo_installs_no_torch() -> None:
    steps = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    [extras] = re.findall(r"-e '\.\[([\w,]+)\]'", steps)
    assert not any(map(needs_torch, extras.split(",")))
