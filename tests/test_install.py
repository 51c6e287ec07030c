"""What is installed with which extra, and what the wheel has in it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from app.core.documents import page

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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def test_a_page_that_a_message_names_is_installed_with_the_wheel(
    wheel: Path, tmp_path: Path
) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    asked = "from app.core.documents import page; print(page('operating.md'), end='')"
    path = subprocess.run(
        [sys.executable, "-P", "-c", asked],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert Path(path).is_relative_to(tmp_path)
    assert Path(path).read_text() == Path(page("operating.md")).read_text()


def test_messages_name_pages_that_exist_by_where_they_are() -> None:
    texts = {p: p.read_text() for d in ("app", "workers") for p in (ROOT / d).rglob("*.py")}
    pages = {n for t in texts.values() for n in re.findall(r"\bpage\([\"']([\w-]+\.md)", t)}
    assert pages
    assert [name for name in pages if not Path(page(name)).exists()] == []
    # Where messages are written, a bare name is no use to whoever has only the wheel.
    said = [str(p) for p, t in texts.items() if re.search(r"see docs/|\(docs/[\w-]+\.md\)", t)]
    assert said == []
