"""What a template reads is what Jinja's own sandbox gives it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from app.tokens import templates

JINJAS = ImmutableSandboxedEnvironment()
OF_DICTS = ("items", "get", "update", "pop", "clear", "__class__", "__init__", "__len__")
OF_JINJAS = ("index0", "last", "cycle", "_iterable", "_last_changed_value", "_Namespace__attrs")
NAMES = st.sampled_from(["role", "content", "_x", "", "mro", *OF_DICTS, *OF_JINJAS])
VALUES = st.sampled_from(["x", 1, None, True, [], {"role": "y"}])
MEMBERS = st.dictionaries(NAMES, VALUES, max_size=4)
OBJECTS = MEMBERS | VALUES | MEMBERS.map(Namespace)
OBJECTS |= st.lists(VALUES).map(lambda items: LoopContext(items, Undefined))


def seen(value):
    """Returns what a template can tell of a value."""
    if isinstance(value, Undefined):
        about = ("message", "name", "obj", "exception")
        return [getattr(value, f"_undefined_{each}") for each in about]
    return type(value), value


@given(OBJECTS, NAMES)
def test_a_template_reads_what_the_sandbox_of_jinja_lets_it_read(thing, name):
    own, jinjas = templates._environment().getattr(thing, name), JINJAS.getattr(thing, name)
    assert seen(own) == seen(jinjas)


@pytest.mark.parametrize("name", OF_DICTS)
def test_a_name_that_dicts_have_themselves_is_not_read_as_a_member(monkeypatch, name):
    """Without the list of such names, the test above fails."""
    thing = {name: "x"}
    assert seen(templates._environment().getattr(thing, name)) == seen(JINJAS.getattr(thing, name))
    monkeypatch.setattr(templates, "_OF_DICTS", frozenset())
    assert templates._environment().getattr(thing, name) == "x"
