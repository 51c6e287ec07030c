"""Chat templates: Jinja in a sandbox, set up as Hugging Face's transformers does.

Templates come from a model's folder, never from a request. Messages are hostile: how long a
rendering takes and how long its result is have bounds.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext
from jinja2.utils import Namespace

from app.core.errors import cut
from app.tokens.content_format import content_format
from app.tokens.errors import Abandoned, Allowance, Unrenderable

MAX_CHARACTERS = 32 << 20
SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_ALLOWANCE = "_kvroute_allowance"
_ITEMS_PER_CHECK = 64
_SYSTEMS_S = 1.0
CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Mark behind the final message while it is rendered, to be found again."""

Message = dict[str, Any]


class _Generation(jinja2.ext.Extension):
    """Tag `{% generation %}`, which marks what the model wrote, for training; here it changes
    nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller: Any) -> Any:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:  # noqa: A002
    return datetime.now().strftime(format)


@jinja2.pass_context
def _allowed(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    allowance: Allowance = context[_ALLOWANCE]
    for number, item in enumerate(items):
        if not number % _ITEMS_PER_CHECK:
            allowance.check()
        yield item


def _bounded(tree: nodes.Template, environment: jinja2.Environment) -> jinja2.Template:
    """Returns the template, whose loops and macros all ask its variable _ALLOWANCE whether they may
    go on: they can take any time without a piece of text coming out."""
    environment.filters[_ALLOWANCE] = _allowed
    check = nodes.Getattr(nodes.Name(_ALLOWANCE, "load"), "check", "load")
    for macro in tree.find_all(nodes.Macro):
        macro.body.insert(0, _call(check, macro.lineno))
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, _ALLOWANCE, [], [], None, None, lineno=loop.lineno)
        if loop.recursive:  # it calls itself with other items than these
            loop.body.insert(0, _call(check, loop.lineno))
    tree.set_environment(environment)
    return environment.from_string(tree)


def _call(called: nodes.Expr, line: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(nodes.Call(called, [], [], None, None), lineno=line)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Sandbox that finds what templates read most without asking an object of every kind that it
    may be, which took half of the time of a chat."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind in _PUBLIC and not attribute.startswith("_"):
            value = getattr(obj, attribute, _ABSENT)
            if value is not _ABSENT:
                return value
        return super().getattr(obj, attribute)


_OF_DICTS = frozenset(dir(dict))
_PUBLIC = (LoopContext, Namespace)
"""Kinds of which a template may read all without an underscore: what they hold has come through
the sandbox."""
_ABSENT = object()


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def has_system_first(source: str) -> bool:
    """Whether the template `source` refuses messages of role `system` between others, as vLLM finds
    it out: without what templates may call. True if that takes long."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    roles = ("system", "user", "system", "user")
    messages = [{"role": role, "content": "t"} for role in roles]
    allowance = Allowance()
    allowance.begin(_SYSTEMS_S)
    try:
        template = _bounded(environment.parse(source), environment)
        template.render(
            {"messages": messages, "add_generation_prompt": False, _ALLOWANCE: allowance}
        )
    except Exception:  # as many kinds as Python code has; it may want tools, or our functions
        return True
    return False


class ChatTemplate:
    """One template, compiled. Safe to call from several threads. special_tokens: by the names that
    it may write, such as bos_token. Raises jinja2.TemplateError if `source` is not a template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        tree = environment.parse(source)
        self._special_tokens = dict(special_tokens)
        self._reads_content = "content" in source
        self.content_format = content_format(tree)
        self.has_system_first = has_system_first(source)
        self.variables = jinja2.meta.find_undeclared_variables(tree)
        self._template = _bounded(tree, environment)
        # Jinja copies them for each prompt, and out of a ChainMap that takes longer than a chat.
        self._template.globals = dict(self._template.globals)
        self.takes_developers = '"developer"' in source or "'developer'" in source

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
        allowance: Allowance | None = None,
    ) -> str:
        """Returns the prompt. variables: all further ones of the template. Raises Unrenderable, and
        what Allowance.check raises."""
        if continue_final_message:
            messages, final = self._marked(messages)
        try:
            text = self._rendered(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                },
                allowance or Allowance(),
            )
        # It may go wrong in as many ways as Python code; the engine says how.
        except (Unrenderable, Abandoned):
            raise
        except Exception as error:
            raise Unrenderable("refused", cut(f"{type(error).__name__}: {error}")) from None
        return _continued(text, final) if continue_final_message else text

    def _rendered(self, variables: Mapping[str, Any], allowance: Allowance) -> str:
        pieces = []
        length = 0
        for piece in self._template.generate({**variables, _ALLOWANCE: allowance}):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_CHARACTERS:
                raise Unrenderable("size", f"rendered, it has over {MAX_CHARACTERS} characters")
            if not len(pieces) % _ITEMS_PER_CHECK:
                allowance.check()
        return "".join(pieces)

    def _marked(self, messages: list[Message]) -> tuple[list[Message], str]:
        final = copy.copy(messages[-1])
        content = final["content"]
        if not self._reads_content:
            raise Unrenderable("refused", "the template reads no content to be continued")
        if isinstance(content, str):
            final["content"] = content + CONTINUED
            return [*messages[:-1], final], content
        if not content:
            raise Unrenderable("refused", "the final message has no text to be continued")
        text: str = content[-1]["text"]
        final["content"] = [*content[:-1], {**content[-1], "text": text + CONTINUED}]
        return [*messages[:-1], final], text


def _continued(text: str, final: str) -> str:
    """Returns the prompt up to the end of the final message, as `render_jinja_template` of
    transformers does."""
    tag = CONTINUED.strip()
    if final.strip() not in text or tag not in text:
        raise Unrenderable("refused", "the template leaves out the message to be continued")
    at = text.rindex(tag)
    # A template that strips the message has stripped the tag's space, not the message's own.
    return text[:at] if text.startswith(CONTINUED, at) else text[:at].rstrip()
