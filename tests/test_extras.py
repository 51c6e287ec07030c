"""Every package that a command imports is installed with it, or its absence names the extra.

Source is read, not run: an import at the bottom of a function counts, too.
"""

from __future__ import annotations

import ast
import gc
import importlib
import re
import sys
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from app.cli import _Main, _Planner
from app.core.errors import MissingPackage
from app.core.extras import OURS, extra

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DISTRIBUTIONS = packages_distributions()

Extras = frozenset[str]
PLAIN = frozenset()


@dataclass(frozen=True, slots=True)
class Import:
    """One of `module`, by code that runs where the plain package and these extras are installed."""

    module: str
    extras: Extras


@dataclass(slots=True)
class Reached:
    """Returns all imports that begin at some module of ours. packages: of others, with who imports
    them."""

    root: Path
    modules: set[Import] = field(default_factory=set)
    packages: dict[Import, str] = field(default_factory=dict)

    def begin(self, module, extras):
        waiting = [Import(module, extras)]
        while waiting:
            found = waiting.pop()
            source = source_of(found.module, self.root)
            if source is None or found in self.modules:
                continue
            self.modules.add(found)
            # A package comes before what is in it.
            if "." in found.module:
                waiting.append(Import(found.module.rpartition(".")[0], found.extras))
            for name, more in imports(source):
                imported = Import(name, found.extras | more)
                package = name.partition(".")[0]
                if package in OURS:
                    waiting.append(imported)
                elif package not in sys.stdlib_module_names:
                    self.packages.setdefault(Import(package, imported.extras), found.module)


def source_of(module, root=ROOT):
    path = root / module.replace(".", "/")
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


@cache
def imports(source):
    """Names of the modules that must be there, with the extras around each."""
    # CPython 3.11 fails where garbage has a traceback formatted meanwhile, which parses, too.
    gc.disable()
    try:
        body = ast.parse(source.read_text()).body
    finally:
        gc.enable()
    return list(_imports(body, PLAIN))


def _imports(nodes, extras):
    for node in nodes:
        match node:
            case ast.Import(names):
                yield from ((alias.name, extras) for alias in names)
            case ast.ImportFrom(str(module), names):
                yield module, extras
                yield from ((f"{module}.{alias.name}", extras) for alias in names)
            case ast.If(ast.Name("TYPE_CHECKING")):
                pass
            case ast.Expr(
                ast.Call(ast.Attribute(attr="import_module"), [ast.Constant(str(named))])
            ):
                yield named, extras
            case ast.With(
                [ast.withitem(ast.Call(ast.Name("extra"), [ast.Constant(str(name)), *_]))]
            ):
                yield from _imports(node.body, extras | {name})
            case ast.Try(handlers=[ast.ExceptHandler(ast.Name("ImportError")), *_]):
                pass  # it goes on without
            case _:
                yield from _imports(children(node), extras)


def children(node):
    """Statements right inside of a statement."""
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            found.append(child)
        else:
            found.extend(children(child))
    return found


@cache
def installed_with(extra):
    """Names of all distributions that come with the plain package, or with an extra of it."""
    wanted = [Requirement(text) for text in (EXTRAS[extra] if extra else PROJECT["dependencies"])]
    found = set()
    done = set()
    while wanted:
        need = wanted.pop()
        name = canonicalize_name(need.name)
        if name == "kvroute":
            found.update(*map(installed_with, need.extras))
            continue
        found.add(name)
        for part in {"", *need.extras}:
            if (name, part) not in done:
                done.add((name, part))
                wanted += [
                    below
                    for below in map(Requirement, requires(name) or ())
                    if below.marker is None or below.marker.evaluate({"extra": part})
                ]
    return frozenset(found)


def missing(reached):
    return sorted(
        f"{importer} imports {package.module} with {sorted(package.extras) or 'nothing'} installed"
        for package, importer in reached.packages.items()
        if not frozenset(map(canonicalize_name, DISTRIBUTIONS.get(package.module, [])))
        & frozenset().union(*map(installed_with, ("", *package.extras)))
    )


def lazy(group):
    for name, module in group.lazy.items():
        yield module, frozenset([group.extras[name]] if name in group.extras else ())


COMMANDS = [("app.__main__", PLAIN), *lazy(_Main), *lazy(_Planner)]


@pytest.fixture(scope="module")
def commands():
    reached = Reached(ROOT)
    for module, extras in COMMANDS:
        reached.begin(module, extras)
    return reached


def test_each_command_finds_all_that_it_imports_or_names_the_extra(commands):
    assert missing(commands) == []


def test_each_image_has_the_extras_of_its_command():
    text = (ROOT / "Dockerfile").read_text()
    text = text.replace("$WORKER_EXTRA", re.search(r"ARG WORKER_EXTRA=(\w+)", text)[1])
    builds = {
        name: PLAIN.union(*(one.split(",") for one in re.findall(r"\.\[([\w,]+)\]", stage)))
        for name, stage in re.findall(r"AS (build-[\w-]+)\n(.*?)\nFROM ", text, re.DOTALL)
    }
    stages = re.findall(
        r"COPY --from=(build-[\w-]+) /venv.*?CMD \[\"kvroute\", \"(\w+)\"\]", text, re.DOTALL
    )
    assert {command for _, command in stages} == {"router", "worker", "agent", "planner", "up"}
    trees = [ast.parse((ROOT / path).read_text()) for path in ("app/cli.py", "app/up.py")]
    nodes = [node for tree in trees for node in tree.body]
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    for build, command in stages:
        needed = PLAIN.union(*(extras for _, extras in _imports(functions[command].body, PLAIN)))
        assert needed <= builds[build], command


def test_all_of_the_package_belongs_to_a_command(commands):
    reached = {found.module for found in commands.modules}
    files = [path for part in ("app", "workers") for path in (ROOT / part).rglob("*.py")]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    modules = {name.removesuffix(".__init__") for name in modules}
    assert modules - reached == set()


def test_the_locust_file_finds_all_that_it_imports():
    reached = Reached(ROOT)
    reached.begin("loadtest.locustfile", frozenset({"loadtest"}))
    assert missing(reached) == []


@pytest.mark.parametrize(
    ("source", "is_there"),
    [
        ("import orjson", True),
        ("import zmq", False),
        ("from zmq import asyncio", False),
        ("def late():\n    if ready():\n        import zmq", False),
        ("with extra('worker'):\n    import zmq", True),
        ("with extra('planner'):\n    import zmq", False),
        ("with extra('torch'):\n    import zmq", True),
        ("with extra('worker'):\n    import torch", False),
        ("with extra('worker'):\n    from workers import bridge", True),
        ("with extra('planner'):\n    from workers import bridge", False),
        ("import workers.bridge", False),
        ("try:\n    import zmq\nexcept ImportError:\n    zmq = None", True),
        ("try:\n    import zmq\nexcept OSError:\n    zmq = None", False),
        ("if TYPE_CHECKING:\n    import zmq", True),
        ("import a_package_that_nothing_installs", False),
    ],
)
def test_an_import_without_its_extra_is_found_wherever_it_stands(tmp_path, source, is_there):
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers/__init__.py").touch()
    (tmp_path / "workers/bridge.py").write_text("import zmq")
    (tmp_path / "app.py").write_text(source)
    reached = Reached(tmp_path)
    reached.begin("app", PLAIN)
    assert (missing(reached) == []) is is_there


def test_a_missing_package_is_named_with_its_extra_and_a_fault_of_ours_is_not_hidden():
    told = r"^zmq is missing: pip install '.\[worker\]' in a clone"
    with pytest.raises(MissingPackage, match=told), extra("worker"):
        raise ModuleNotFoundError(name="zmq.asyncio")
    with pytest.raises(ModuleNotFoundError), extra("worker"):
        importlib.import_module("workers.no_such_module")


def test_a_checkout_has_all_that_benchmarks_import():
    reached = Reached(ROOT)
    for path in (ROOT / "loadtest").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        reached.begin(name.removesuffix(".__init__"), frozenset({"dev"}))
    assert missing(reached) == []
