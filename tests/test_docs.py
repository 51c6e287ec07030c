"""Documents: those that are made from code are fresh, links lead somewhere, none is too long."""

import re
from pathlib import Path

import orjson
import pytest

from tools import measurements, reference

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "lua/README.md",
    ROOT / "loadtest/data/README.md",
    *sorted(DOCS.glob("**/*.md")),
]
WRITTEN = {
    "api.md": reference.api,
    "configuration.md": reference.configuration,
    "access-log.md": reference.access_log,
    "measurements.md": lambda: measurements.page(orjson.loads(measurements.FIGURES.read_bytes())),
}
MAX_WORDS_OF_THE_README = 1300
MAX_WORDS = 2000
UNBOUNDED = {
    ROOT / "lua/README.md",
    *(DOCS / name for name in WRITTEN),
}

LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
PLACE = re.compile(r"`((?:app|workers|lua|tests|loadtest|deploy|docs)/[\w./-]*)`")


def name(path):
    return str(path.relative_to(ROOT))


def prose(document):
    """The text without blocks of code."""
    return re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)


def anchor_of(heading):
    """The name that GitHub gives to a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def anchors(document):
    yield from map(anchor_of, re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE))


def linked(document):
    """The files that a document's links name, without their headings."""
    return {link.partition("#")[0] for link in LINK.findall(prose(document))} - {""}


@pytest.mark.parametrize("page", WRITTEN)
def test_a_page_made_by_a_command_is_fresh(page):
    make = WRITTEN[page]
    assert (DOCS / page).read_text() == make(), "run `make docs`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_between_documents_lead_somewhere(document):
    for link in LINK.findall(prose(document)):
        if "://" in link:
            continue
        place, _, anchor = link.partition("#")
        target = (document.parent / place).resolve() if place else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_files_that_a_document_names_exist(document):
    missing = [
        place for place in PLACE.findall(document.read_text()) if not (ROOT / place).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("document", sorted(set(DOCUMENTS) - UNBOUNDED), ids=name)
def test_a_document_is_short(document):
    limit = MAX_WORDS_OF_THE_README if document == ROOT / "README.md" else MAX_WORDS
    assert len(document.read_text().split()) <= limit


def test_every_document_can_be_reached_from_the_readme():
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        links = {(page.parent / link).resolve() for page in new for link in linked(page)}
        new = links & set(DOCUMENTS) - reached
    assert set(DOCUMENTS) - reached == set()


def test_each_figure_is_one_number_or_a_range_and_has_a_unit():
    for subject in orjson.loads(measurements.FIGURES.read_bytes()):
        assert subject["command"]
        for row in subject["rows"]:
            figure = row["figure"]
            if figure is None:  # of a machine that nobody had
                assert row["at"]
            else:
                least, most = figure if isinstance(figure, list) else (figure, figure)
                assert least <= most
            assert row["what"]
            assert row["unit"]


def test_figures_are_replaced_by_the_least_and_the_most_of_several_runs():
    rows = [
        {"what": "a", "figure": 1, "unit": "ms", "at": ["ms", "p50"]},
        {"what": "b", "figure": 1, "unit": "%", "at": ["used"], "over": ["all"], "times": 100},
        {"what": "c", "figure": 1, "unit": "s", "at": ["runs", "*", "s"]},
        {"what": "d", "figure": 7, "unit": "read off what was printed"},
    ]
    one = {"ms": {"p50": 1.2345}, "used": 2, "all": 8, "runs": [{"s": 3}, {"s": 4}]}
    other = {"ms": {"p50": 0.5}, "used": 4, "all": 16, "runs": [{"s": 5}]}
    measurements.replace_figures(rows, [one, other])
    assert [row["figure"] for row in rows] == [[0.5, 1.23], 25, [3, 5], 7]
