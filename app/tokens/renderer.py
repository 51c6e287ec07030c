"""Renderers: prompts of a model as token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import jinja2

from app.core.errors import cut
from app.tokens import files
from app.tokens.anthropic import Habits
from app.tokens.encoder import Encoder, Ids
from app.tokens.errors import Allowance, OutOfTime, TokenizerUnavailable, Unrenderable
from app.tokens.messages import MEMBERS, chat_of, size
from app.tokens.pool import TokenizerThreads
from app.tokens.templates import ChatTemplate

AT_ONCE_CHARACTERS = 1_000
"""Characters up to which prompts are tokenized where they are: handing them to a thread takes as
long."""
AT_ONCE_S = 0.02
"""Seconds after which a small prompt is begun anew in a thread: a template can make much of
little."""
PROMPT_S = 20.0
"""Seconds after which a prompt is left to the engine: as long as four million letters take."""
REMEMBERED_BYTES = 64 << 20
"""Bytes of texts and ids remembered per model: some six million tokens."""

T = TypeVar("T")
_POOL = TokenizerThreads()


def load(
    source: str, pool: TokenizerThreads = _POOL, max_bytes: int = REMEMBERED_BYTES
) -> Renderer:
    """Returns the Renderer of a model. Takes up to seconds: call it in a thread.

    source: a folder with a tokenizer.json and, for chats, a template; or the name of a model in the
    local Hugging Face cache. Nothing is downloaded. max_bytes: of texts and ids remembered, lest
    they are tokenized again. Raises TokenizerUnavailable.
    """
    model = files.read(files.folder_of(source))
    try:
        templates = {
            name: ChatTemplate(text, model.special_tokens) for name, text in model.templates.items()
        }
    except (jinja2.TemplateError, RecursionError) as error:
        raise TokenizerUnavailable(f"{source}: its chat template: {cut(str(error))}") from None
    used = {
        token.content
        for token in model.tokenizer.get_added_tokens_decoder().values()
        if token.content in model.special_tokens.values()
        or any(token.content in text for text in model.templates.values())
    }
    return Renderer(model, templates, Encoder(model.tokenizer, used, max_bytes), pool)


def _habits(templates: Mapping[str, ChatTemplate]) -> Habits:
    """Returns the habits that vLLM finds by probing the templates."""
    default = templates.get("default")
    return Habits(
        merges_systems=default is None or any(t.has_system_first for t in templates.values()),
        effort_without_thoughts="low" if default is None else _effort_without_thoughts(default),
    )


def _effort_without_thoughts(template: ChatTemplate) -> str:
    """Returns `none`, if that makes another prompt than any other effort does, else `low`."""

    def prompt(effort: str) -> str | None:
        asked = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
        with suppress(Unrenderable):
            return rendered(template, asked)
        return None

    none = prompt("none")
    efforts = ("low", "medium", "high", "xhigh", "max")
    return "low" if none is None or any(prompt(e) == none for e in efforts) else "none"


class Renderer:
    """Renderer of a model's prompts, made by `load`."""

    def __init__(
        self,
        model: files.ModelFiles,
        templates: Mapping[str, ChatTemplate],
        encoder: Encoder,
        pool: TokenizerThreads,
    ) -> None:
        self._model = model
        self._templates = templates
        self._encoder = encoder
        self._pool = pool
        self.habits = _habits(templates)
        self.media_rule = model.media_rule

    @property
    def fingerprint(self) -> str:
        """Hash that equals a worker's `tokenizer_hash`, if its engine tokenizes alike."""
        return self._encoder.fingerprint

    async def of_chat(
        self, body: Mapping[str, Any], max_tokens: int = 0, *, holder: str = ""
    ) -> Ids:
        """Returns the ids of a chat request. body: its parsed JSON. max_tokens: 0: any number.
        holder: who asks, for TokenizerThreads. Raises Unrenderable, if only the engine can tell;
        TooManyTokens; Overloaded."""
        # A body's own look-ups take longer than a dict's, and there are many.
        chat = {name: body[name] for name in body.keys() & MEMBERS}
        return await self._run(size(chat), max_tokens, holder, self._chat, chat, False)

    async def of_response(
        self, body: Mapping[str, Any], max_tokens: int = 0, *, holder: str = ""
    ) -> Ids:
        """Returns the ids of what `chat_of_response` made. Raises Unrenderable, TooManyTokens,
        Overloaded. vLLM puts the tokenizer's special tokens around what the template makes of
        these, and names a tool call before its arguments."""
        return await self._run(size(body), max_tokens, holder, self._chat, body, True)

    async def of_text(
        self, prompt: str, add_special_tokens: bool = True, max_tokens: int = 0, *, holder: str = ""
    ) -> Ids:
        """Returns the ids of the prompt of a completion. add_special_tokens: whether to add those
        that the tokenizer puts around a text. Raises Unrenderable, if it is not Unicode;
        TooManyTokens; Overloaded."""
        made = self._run(len(prompt), max_tokens, holder, self._text, prompt, add_special_tokens)
        return await made

    async def apart(self, length: int, convert: Callable[[], T], *, holder: str = "") -> T:
        """Returns or raises what `convert()` does, from a thread. length: of what it reads, in
        characters. Raises Overloaded."""
        return await self._pool.run(length, convert, holder=holder)

    async def _run(
        self, length: int, max_tokens: int, holder: str, call: Callable[..., Ids], *args: object
    ) -> Ids:
        if length <= AT_ONCE_CHARACTERS:
            with suppress(OutOfTime):
                return _within(AT_ONCE_S, call, Allowance(max_tokens), *args)
        allowance = Allowance(max_tokens)
        try:
            within = partial(_within, PROMPT_S, call, allowance, *args)
            return await self._pool.run(length, within, holder=holder)
        finally:
            allowance.is_abandoned = True

    def _text(self, allowance: Allowance, prompt: str, add_special_tokens: bool) -> Ids:
        return self._encoder.encode(
            prompt, add_special_tokens=add_special_tokens, allowance=allowance
        )

    def _chat(self, allowance: Allowance, body: Mapping[str, Any], of_response: bool) -> Ids:
        template = self._template(has_tools=bool(body.get("tools")))
        text = rendered(template, body, of_response=of_response, allowance=allowance)
        return self._encoder.encode(text, add_special_tokens=of_response, allowance=allowance)

    def _template(self, *, has_tools: bool) -> ChatTemplate:
        template = self._templates.get("default")
        if has_tools:
            template = self._templates.get("tool_use", template)
        if template is None:
            raise Unrenderable("template", self._model.why_no_template)
        if unsure := template.variables & self._model.unsure:
            raise Unrenderable("template", f"{', '.join(sorted(unsure))}: known to engines alone")
        return template


def _within(seconds: float, call: Callable[..., Ids], allowance: Allowance, *args: object) -> Ids:
    allowance.begin(seconds)
    return call(allowance, *args)


def rendered(
    template: ChatTemplate,
    body: Mapping[str, Any],
    *,
    of_response: bool = False,
    allowance: Allowance | None = None,
) -> str:
    """Returns the text that the model is prompted with. Raises Unrenderable, and what
    Allowance.check raises. of_response: made by `chat_of_response`: names come first in tool calls.
    """
    chat = chat_of(body, template.content_format, takes_developers=template.takes_developers)
    if of_response:
        for message in chat.messages:
            for call in message.get("tool_calls", ()):
                call["function"] = {name: call["function"][name] for name in ("name", "arguments")}
    return template.render(
        chat.messages,
        chat.tools,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        variables=chat.variables,
        allowance=allowance,
    )
