"""Every script's header is its contract: it declares what the body uses, no more and no less."""

import re
from pathlib import Path

import pytest

from app.core.keys import KEY_TYPES, SHARD_KEY_TYPES
from app.core.loads import LOAD_FIELDS
from app.state.records import FIELDS
from app.state.scripts import load_script

LUA = Path(__file__).parent.parent / "lua"
SCRIPTS = sorted(path.stem for path in LUA.glob("*.lua"))
README = LUA / "README.md"
TABLE = re.findall(
    r"^\| `([\w:]+)(?:<\w+>)?` \| (\w+) \| (.+) \| ([a-z_, ]+) \| .+ \|$", README.read_text(), re.M
)
"""Prefix, type, contents and writers of each key in the README; its shards' keys come last."""
LIBS = sorted(path.stem for path in (LUA / "lib").glob("*.lua"))

SLOT = re.compile(r"\b(KEYS|ARGV)\[(\d+)\]")
DECLARED_SLOT = re.compile(r"^-- (KEYS|ARGV)\[(\d+)(\.\.\.)?\] +(\S+) +(\S+)", re.MULTILINE)
FILLS = re.compile(r"\bredis\.p?call\(\s*'(?:HSET|HINCRBY|ZADD|RPUSH|SADD)',\s*(\w+)\b")
"""The name of a variable that holds a key, or the prefix of a family of keys."""
INCLUDE = re.compile(r"^-- @include (\w+)$", re.MULTILINE)
COMMAND = re.compile(r"\bredis\.p?call\(\s*'(\w+)'\s*,?\s*(?:(?<='OBJECT', )'ENCODING', )?(.)")
"""A command, and the first character of its first argument, which is a key."""

BUILT_IN = set(
    re.findall(
        r"\w+",
        """
        and break do else elseif end false for function if in local nil not or repeat return then
        true until while error ipairs next pairs pcall tonumber tostring type unpack math string
        table
        ARGV KEYS cjson redis
        """,
    )
)
"""Lua keywords, and the globals that Lua and Redis give to every script."""


def raw(name):
    return (LUA / f"{name}.lua").read_text()


def header(text):
    """The comment lines before the first line of code, except the includes."""
    lines = re.match(r"(?:--.*\n)*", text)
    assert lines
    return INCLUDE.sub("", lines[0])


def code(text):
    """`text` without comments."""
    return re.sub(r"--.*", "", text)


def declared(name, kind):
    """The number of each slot in the header's order, and whether any number of others follow."""
    found = DECLARED_SLOT.findall(header(raw(name)))
    return [(int(number), bool(more)) for slot, number, more, *_ in found if slot == kind]


def used(name, kind):
    """Slots in the body, with the libs pasted in."""
    body = code(load_script(name).text)
    return {int(number) for slot, number in SLOT.findall(body) if slot == kind}


def wants(lib):
    """The locals and libs that a lib's header says it wants."""
    head = header(raw(f"lib/{lib}")).replace("\n-- ", " ")
    found_locals = re.search(r"\bWants locals: ([\w, ]+)", head)
    found_libs = re.search(r"\b(?:Wants|and) libs?:? ([\w, ]+)\.", head)
    return (
        set(found_locals[1].split(", ")) if found_locals else set(),
        set(found_libs[1].split(", ")) if found_libs else set(),
    )


def defined(text):
    """Names that `text` declares local, functions, parameters and loop variables included."""
    body = code(text)
    names = re.findall(r"\blocal (?!function)([\w, ]+?)\s*(?:=|\n|$)", body)
    names += re.findall(r"\bfor ([\w, ]+?) (?:in|=)", body)
    names += re.findall(r"\bfunction(?: \w+)?\(([\w,\s]*)\)", body)
    functions = set(re.findall(r"\bfunction (\w+)\(", body))
    return functions | {name for group in names for name in re.split(r",\s*", group) if name}


def free(text):
    """Names that `text` uses and neither declares nor finds in Lua or Redis."""
    body = re.sub(r"'[^'\n]*'", "''", code(text))
    fields = r"(?<![.\w])([A-Za-z_]\w*)\b(?!\s*=[^=])"  # neither x.name nor {name = ...}
    return set(re.findall(fields, body)) - BUILT_IN - defined(text)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_header_says_what_the_script_does_what_it_returns_and_what_it_costs(name):
    head = header(raw(name))
    assert re.match(rf"-- {name}: \S.*", head)
    assert re.search(r"^-- Returns  +\S", head, re.MULTILINE)
    assert re.search(r"^-- Cost     +O\(.+\).*\. (Writes|Reads only)\.", head, re.MULTILINE)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_header_declares_exactly_the_keys_that_the_body_uses(name):
    slots = [number for number, _ in declared(name, "KEYS")]
    assert slots == list(range(1, len(slots) + 1))
    assert set(slots) == used(name, "KEYS")
    assert len(load_script(name).key_names) == len(slots)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_header_declares_exactly_the_arguments_that_the_body_uses(name):
    slots = declared(name, "ARGV")
    assert [number for number, _ in slots] == list(range(1, len(slots) + 1))
    fixed = {number for number, more in slots if not more}
    assert fixed == used(name, "ARGV")
    takes_any_number = re.search(r"\bARGV\b(?!\[)", code(load_script(name).text)) is not None
    assert [more for _, more in slots] == [False] * len(fixed) + [True] * takes_any_number


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_test_of_each_script_runs_on_the_oldest_server_in_make_test(name):
    tests = (Path(__file__).parent / "lua" / f"test_{name}.py").read_text()
    assert tests.count("@pytest.mark.oldest_too\n") == 1


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_key_in_a_header_is_documented_with_the_same_type(name):
    documented = KEY_TYPES | SHARD_KEY_TYPES | {"models": "hash"}
    for slot, _, _, key, kind in DECLARED_SLOT.findall(header(raw(name))):
        if slot == "KEYS":
            family = key.endswith(":")
            assert kind == (plural(documented[key]) if family else documented[key]), key


@pytest.mark.parametrize("name", sorted(FIELDS.keys() & {*SCRIPTS}))
def test_the_header_tells_of_each_field_of_its_rows_in_their_order(name):
    rows = " ".join(header(raw(name)).partition("app/state/records.py")[2].split())
    in_order = r".*?".join(rf"\b{field}\b" for field in FIELDS[name])
    assert re.search(in_order, rows)
    assert f"= {{{str(FIELDS[name])[1:-1]}}}\n" in load_script(name).text


def test_the_readme_shows_each_key_with_its_type():
    types = [(prefix, kind) for prefix, kind, *_ in TABLE]
    own = [prefix for prefix, _ in types].index("shard")
    assert (dict(types[:own]), dict(types[own:])) == (KEY_TYPES, SHARD_KEY_TYPES)
    contents = {prefix: text for prefix, _, text, _ in TABLE}
    assert f"`{' '.join(LOAD_FIELDS)}`" in contents["load"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_key_that_a_script_fills_is_documented_as_written_by_it(name):
    writers = {prefix: names.split(", ") for prefix, _, _, names in TABLE}
    for variable in FILLS.findall(code(load_script(name).text)):
        key = variable.replace("_prefix", ":")
        if key in writers:
            assert name in writers[key], key


def test_every_documented_writer_is_a_script_or_a_plain_command():
    named = {writer for *_, names in TABLE for writer in names.split(", ")}
    assert named - {*SCRIPTS} == {"agents", "compute", "record"}


def plural(kind):
    return kind + "es" if kind.endswith("h") else kind + "s"


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_script_writes_if_and_only_if_its_header_says_so(name, redis):
    commands = {command for command, _ in COMMAND.findall(code(load_script(name).text))}
    table = await redis.execute_command("COMMAND", "INFO", *commands)
    assert set(table) == {command.lower() for command in commands}
    writing = {command for command, about in table.items() if "write" in about["flags"]}
    assert bool(writing) == (" Writes." in header(raw(name))), writing


@pytest.mark.parametrize("name", [*SCRIPTS, *(f"lib/{lib}" for lib in LIBS)])
def test_no_script_spells_out_a_key_of_a_command(name):
    body = code(raw(name))
    calls = COMMAND.findall(body)
    assert len(calls) == len(re.findall(r"\bredis\.p?call\b", body))
    assert [command for command, argument in calls if argument in "'\"["] == []
    assert "kvroute" not in body


@pytest.mark.parametrize("lib", LIBS)
def test_a_lib_declares_exactly_the_locals_and_libs_that_it_uses(lib):
    wanted_locals, wanted_libs = wants(lib)
    functions = set().union(*(defined_at_top(raw(f"lib/{other}")) for other in wanted_libs))
    unexplained = free(raw(f"lib/{lib}"))
    assert unexplained - functions == wanted_locals
    assert all(unexplained & defined_at_top(raw(f"lib/{other}")) for other in wanted_libs)


def defined_at_top(text):
    """Functions that a lib gives to the script it is pasted into."""
    return set(re.findall(r"^local function (\w+)\(", text, re.MULTILINE))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_defines_what_a_lib_wants_before_it_includes_it(name):
    text = raw(name)
    included = set()
    for found in INCLUDE.finditer(text):
        wanted_locals, wanted_libs = wants(found[1])
        assert wanted_locals <= defined(text[: found.start()])
        assert wanted_libs <= included
        included.add(found[1])


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_or_its_libs_use_every_lib_that_it_includes(name):
    libs = {lib: raw(f"lib/{lib}") for lib in INCLUDE.findall(raw(name))}
    for lib, text in libs.items():
        others = code(raw(name)) + "".join(code(libs[other]) for other in libs if other != lib)
        assert defined_at_top(text) & set(re.findall(r"\w+", others)), lib


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_uses_no_undefined_name(name):
    assert free(load_script(name).text) == set()


@pytest.mark.parametrize("lib", LIBS)
def test_every_lib_is_included_somewhere_and_includes_none_itself(lib):
    assert any(lib in INCLUDE.findall(raw(name)) for name in SCRIPTS)
    assert INCLUDE.findall(raw(f"lib/{lib}")) == []
