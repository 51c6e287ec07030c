"""Format of message content that a chat template takes: text, or a list of parts.

vLLM decides by the template's syntax tree: if it loops over the content of a message, it is given
lists. The rules here are those of `_detect_content_format` in vllm/renderers/hf.py (0.32,
Apache-2.0), so that the same templates are given the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from jinja2 import nodes

ContentFormat = Literal["string", "openai"]


def content_format(tree: nodes.Template) -> ContentFormat:
    """Returns the format for a parsed template; openai: lists of parts."""
    try:
        return "openai" if any(_content_loops(tree)) else "string"
    except AssertionError:  # it assigns to what is not a plain name, of which vLLM makes nothing
        return "string"


def _is_variable(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _is_attribute(node: nodes.Node, name: str, key: str) -> bool:
    if isinstance(node, nodes.Getitem):
        is_key = isinstance(node.arg, nodes.Const) and node.arg.value == key
        return is_key and _is_variable(node.node, name)
    return isinstance(node, nodes.Getattr) and node.attr == key and _is_variable(node.node, name)


def _is_access(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether a node is the variable (key: that member of it), filtered, tested or sliced."""
    if node is None:
        return False
    if isinstance(node, nodes.Filter | nodes.Test):
        return _is_access(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_access(node.node, name, key)
    return _is_attribute(node, name, key) if key else _is_variable(node, name)


def _target(node: nodes.Assign | nodes.For) -> str:
    assert isinstance(node.target, nodes.Name)
    return node.target.name


def _message_lists(tree: nodes.Template) -> set[str]:
    names = {"messages"}
    pending = ["messages"]
    while pending:
        name = pending.pop()
        for assign in tree.find_all(nodes.Assign):
            if _is_access(assign.node, name) and (target := _target(assign)) not in names:
                names.add(target)
                pending.append(target)
    return names


def _messages(tree: nodes.Template) -> list[str]:
    lists = _message_lists(tree)
    return [
        _target(loop)
        for loop in tree.find_all(nodes.For)
        if any(_is_access(loop.iter, name) for name in lists)
    ]


def _content_loops(tree: nodes.Template) -> Iterator[bool]:
    messages = _messages(tree)
    in_macros: dict[int, set[str]] = {}
    """Loop in a macro -> the macro's parameters that are given contents."""
    for macro in tree.find_all(nodes.Macro):
        contents = _content_parameters(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            in_macros[id(loop)] = contents or in_macros.get(id(loop), set())
    for loop in tree.find_all(nodes.For):
        name = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        is_content = (
            any(_is_access(loop.iter, message, "content") for message in messages)
            or name in in_macros.get(id(loop), ())
            or (id(loop) not in in_macros and name == "content")
        )
        if is_content:
            _target(loop)
        yield is_content


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    names = [parameter.name for parameter in macro.args]
    parameters = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = [*zip(names, call.args, strict=False)]
        given += [(keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in names]
        for name, value in given:
            if any(_is_access(value, message, "content") for message in messages):
                parameters.add(name)
    return parameters
