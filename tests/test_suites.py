import re

import pytest

from tools import suites

MAKEFILE = (suites.ROOT / "Makefile").read_text()


def test_each_optional_target_writes_its_row():
    targets = set(re.findall(r"^test-([\w-]+):", MAKEFILE, re.MULTILINE)) - {"quick"}
    assert set(re.findall(r"\$\(SUITE\) ([\w-]+) ", MAKEFILE)) == targets
    rows = re.findall(r"^\| ([\w-]+) \|", suites.PAGE.read_text(), re.MULTILINE)
    assert set(rows) - {"suite"} == targets


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("12 passed, 1 skipped in 3.21s", "12 passed, 1 skipped"),
        (
            "=== 1 failed, 2 passed, 7 deselected in 61.00s (0:01:01) ===",
            "1 failed, 2 passed, 7 deselected",
        ),
        ("a page of faults", ""),
    ],
)
def test_what_pytest_counts_is_found_in_what_is_printed(line, counts, capfd):
    status, found = suites.run(["echo", line])
    assert (status, capfd.readouterr().out) == (0, f"{line}\n")
    assert found == counts


def test_a_suite_has_one_row_and_one_of_another_name_is_refused():
    page = "| suite |\n| slow | - |\n| sick | - |\n"
    assert suites.with_row(page, "sick", "now") == "| suite |\n| slow | - |\n| sick | now |\n"
    with pytest.raises(ValueError, match="no row for fast"):
        suites.with_row(page, "fast", "now")
