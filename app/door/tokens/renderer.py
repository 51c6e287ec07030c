"""The ids of a model's prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jinja2

from app.core.errors import cut
from app.door.tokens import files
from app.door.tokens.allowance import Allowance
from app.door.tokens.encoder import Encoder, Ids
from app.door.tokens.errors import TokenizerUnavailable, Unrenderable
from app.door.tokens.messages import chat_of, size
from app.door.tokens.pool import TokenizerThreads
from app.door.tokens.templates import ChatTemplate

AT_ONCE_CHARACTERS = 1_000
"""Shorter prompts are tokenized where they are: handing them to a thread takes as long."""
REMEMBERED_BYTES = 64 << 20
"""Of texts and their ids, per model: some six million tokens."""

_POOL = TokenizerThreads()


def load(
    source: str, pool: TokenizerThreads = _POOL, max_bytes: int = REMEMBERED_BYTES
) -> Renderer:
    """What renders and tokenizes a model's prompts. Takes up to seconds: call it in a thread.

    source: a folder with a tokenizer.json and, for chats, a template; or the name of a model in the
    local Hugging Face cache. Nothing is downloaded. max_bytes: how much to remember of texts and
    their ids, lest they are tokenized again.
    Raises TokenizerUnavailable.
    """
    found = files.read(files.folder_of(source))
    try:
        templates = {
            name: ChatTemplate(text, found.special_tokens) for name, text in found.templates.items()
        }
    except (jinja2.TemplateError, RecursionError) as error:
        raise TokenizerUnavailable(f"{source}: its chat template: {cut(str(error))}") from None
    used = {
        token.content
        for token in found.tokenizer.get_added_tokens_decoder().values()
        if token.content in found.special_tokens.values()
        or any(token.content in text for text in found.templates.values())
    }
    return Renderer(found, templates, Encoder(found.tokenizer, used, max_bytes), pool)


class Renderer:
    """Made by `load`."""

    def __init__(
        self,
        found: files.ModelFiles,
        templates: Mapping[str, ChatTemplate],
        encoder: Encoder,
        pool: TokenizerThreads,
    ) -> None:
        self._found = found
        self._templates = templates
        self._encoder = encoder
        self._pool = pool

    @property
    def fingerprint(self) -> str:
        """As a worker's `tokenizer_hash`, if its engine tokenizes alike."""
        return self._encoder.fingerprint

    async def of_chat(self, body: Mapping[str, Any], max_tokens: int = 0) -> Ids:
        """The ids of a chat request. body: what its JSON says. max_tokens: that they may be; 0: any
        number.

        Raises Unrenderable, if only the engine can tell; TooManyTokens; Overloaded.
        """
        return await self._run(size(body), max_tokens, self._chat, body)

    async def of_response(self, body: Mapping[str, Any], max_tokens: int = 0) -> Ids:
        """As of_chat, of what `chat_of_response` made.

        vLLM puts the tokenizer's special tokens around what the template has made of these, and
        names a tool call before its arguments.
        """
        return await self._run(size(body), max_tokens, self._response, body)

    async def of_text(
        self, prompt: str, add_special_tokens: bool = True, max_tokens: int = 0
    ) -> Ids:
        """The ids of the prompt of a completion.

        add_special_tokens: those that the tokenizer puts around a text.
        Raises Unrenderable, if it is not Unicode; TooManyTokens; Overloaded.
        """
        return await self._run(len(prompt), max_tokens, self._text, prompt, add_special_tokens)

    async def _run(
        self, length: int, max_tokens: int, call: Callable[..., Ids], *args: object
    ) -> Ids:
        """length: of the text, in characters."""
        allowance = Allowance(max_tokens)
        if length <= AT_ONCE_CHARACTERS:
            return call(allowance, *args)
        try:
            return await self._pool.run(length, call, allowance, *args)
        finally:
            allowance.is_abandoned = True

    def _text(self, allowance: Allowance, prompt: str, add_special_tokens: bool) -> Ids:
        return self._encoder.encode(
            prompt, add_special_tokens=add_special_tokens, allowance=allowance
        )

    def _chat(self, allowance: Allowance, body: Mapping[str, Any]) -> Ids:
        template = self._template(has_tools=bool(body.get("tools")))
        return self._encoder.encode(rendered(template, body), allowance=allowance)

    def _response(self, allowance: Allowance, body: Mapping[str, Any]) -> Ids:
        template = self._template(has_tools=bool(body.get("tools")))
        text = rendered(template, body, names_come_first=True)
        return self._encoder.encode(text, add_special_tokens=True, allowance=allowance)

    def _template(self, *, has_tools: bool) -> ChatTemplate:
        template = self._templates.get("default")
        if has_tools:
            template = self._templates.get("tool_use", template)
        if template is None:
            raise Unrenderable("template", self._found.why_no_template)
        if unsure := template.variables & self._found.unsure:
            raise Unrenderable("template", f"{', '.join(sorted(unsure))}: known to engines alone")
        return template


def rendered(
    template: ChatTemplate, body: Mapping[str, Any], *, names_come_first: bool = False
) -> str:
    """The text that the model is prompted with. Raises Unrenderable.

    names_come_first: in tool calls.
    """
    chat = chat_of(body, template.content_format, takes_developers=template.takes_developers)
    if names_come_first:
        for message in chat.messages:
            for call in message.get("tool_calls", ()):
                call["function"] = {name: call["function"][name] for name in ("name", "arguments")}
    return template.render(
        chat.messages,
        chat.tools,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
    )
