"""Chat templates: Jinja in a sandbox, set up as Hugging Face's transformers does.

Templates come from a model's folder, never from a request. Messages are hostile: how long a
rendering takes and how long its result is have bounds.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

from app.core.errors import cut
from app.door.tokens.content_format import content_format
from app.door.tokens.errors import Unrenderable

MAX_CHARACTERS = 32 << 20
"""Of a rendered prompt: several million tokens."""
TIMEOUT_S = 10.0
SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands behind the final message while it is rendered, to be found again."""

Message = dict[str, Any]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; here it changes nothing."""

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
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(format: str) -> str:  # noqa: A002
    return datetime.now().strftime(format)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One template, compiled. Safe to call from several threads.

    special_tokens: what it may write by name, such as bos_token.
    Raises jinja2.TemplateError if `source` is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        tree = environment.parse(source)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self._reads_content = "content" in source
        self.content_format = content_format(tree)
        self.variables = jinja2.meta.find_undeclared_variables(tree)
        self.takes_developers = '"developer"' in source or "'developer'" in source

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """The prompt. Raises Unrenderable."""
        if continue_final_message:
            messages, final = self._marked(messages)
        try:
            text = self._rendered(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        # It may go wrong in as many ways as Python code; the engine says how.
        except Unrenderable:
            raise
        except Exception as error:
            raise Unrenderable("refused", cut(f"{type(error).__name__}: {error}")) from None
        return _continued(text, final) if continue_final_message else text

    def _rendered(self, **variables: Any) -> str:
        until = time.monotonic() + TIMEOUT_S
        pieces = []
        length = 0
        for piece in self._template.generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_CHARACTERS:
                raise Unrenderable("size", f"rendered, it has over {MAX_CHARACTERS} characters")
            if time.monotonic() > until:
                raise Unrenderable("size", f"rendering it takes over {TIMEOUT_S:g} s")
        return "".join(pieces)

    def _marked(self, messages: list[Message]) -> tuple[list[Message], str]:
        """The messages, the last with the tag; and what is to be continued."""
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
    """The prompt up to the end of the final message. As `render_jinja_template` of transformers."""
    tag = CONTINUED.strip()
    if final.strip() not in text or tag not in text:
        raise Unrenderable("refused", "the template leaves out the message to be continued")
    at = text.rindex(tag)
    # A template that strips the message has stripped the tag's space, not the message's own.
    return text[:at] if text.startswith(CONTINUED, at) else text[:at].rstrip()
