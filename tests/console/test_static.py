"""The files of the console's page: what is vendored, how large it is, and what it may not use."""

import gzip
import hashlib
import re
from pathlib import Path

import pytest

STATIC = Path(__file__).parents[2] / "app" / "console" / "static"
VENDOR = STATIC / "vendor"
MAX_BYTES = 120_000
ROW = re.compile(r"^\| (\S+) \|.*\| ([0-9a-f]{64}) \|$", re.M)
SUMS = dict(ROW.findall((VENDOR / "README.md").read_text()))
OURS = sorted(p for p in STATIC.rglob("*.js") if VENDOR not in p.parents)


def test_every_vendored_file_is_in_the_table_and_as_it_was_published():
    files = {path.name: path for path in VENDOR.iterdir() if path.name != "README.md"}
    assert {name: hashlib.sha256(p.read_bytes()).hexdigest() for name, p in files.items()} == SUMS


def test_all_of_the_page_is_below_120_kb_compressed():
    sent = [p for p in STATIC.rglob("*") if p.suffix in (".html", ".css", ".js", ".svg")]
    assert sum(len(gzip.compress(path.read_bytes())) for path in sent) < MAX_BYTES


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_no_script_of_ours_writes_markup_or_asks_another_origin(path):
    text = path.read_text()
    assert not re.search(r"innerHTML|insertAdjacentHTML|\beval\b|new Function", text)
    assert "://" not in text


def test_every_module_that_is_imported_exists():
    for path in OURS:
        for name in re.findall(r'from "([^"]+)"', path.read_text()):
            assert (path.parent / name).is_file(), f"{path.name} imports {name}"
