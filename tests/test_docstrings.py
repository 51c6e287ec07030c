"""That docstrings begin with a verb or a noun: no preposition, no pronoun, no other docstring."""

import ast
import re

import pytest

from tests.test_docs import ROOT

BAD = re.compile(
    "(About|After|All|Among|And|As|At|Before|Beside|Between|Beyond|By|For|From|Here|In|Into|Its?|"
    "Like|Of|On|Or|See|So|That|Their|Then|There|These|They|This|Those|Though|To|Under|Until|What|"
    "When|Where|Which|While|Who|Whom|Whose|With|Within|Without|The same|The other|(The o|O)ne that)"
    r"\b"
)


def bad_openings(source):
    """The lines of docstrings that open badly, with their first lines."""
    bodies = (getattr(node, "body", None) for node in ast.walk(ast.parse(source)))
    for body in bodies:
        for one in body if isinstance(body, list) else []:
            match one:
                case ast.Expr(value=ast.Constant(value=str(text))) if text.strip():
                    if BAD.match(text.strip()):
                        yield one.lineno, text.strip().splitlines()[0]


@pytest.mark.parametrize(
    ("docstring", "is_bad"),
    [
        ("Returns the worker's load.", False),
        ("Whether the worker is full.", False),
        ("What comes of it.", True),
        ("As above.", True),
        ("  Of others.", True),
        ("The same of a session.", True),
    ],
)
def test_openings_are_told_apart(docstring, is_bad):
    for source in ('"""{}"""', 'def f():\n    """{}"""', 'class A:\n    x = 1\n    """{}"""'):
        assert bool(list(bad_openings(source.format(docstring)))) == is_bad


def test_docstrings_begin_with_what_they_are_about():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for package in ("app", "workers")
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in bad_openings(path.read_text())
    ]
    assert found == []
