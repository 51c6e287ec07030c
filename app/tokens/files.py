"""Files of a model that say how its prompts are rendered and tokenized.

The choice among them is that of transformers 5, with which vLLM and SGLang load tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import tokenizers
from tokenizers import AddedToken

from app.core.errors import cut
from app.tokens.errors import TokenizerUnavailable
from app.tokens.media import Rule, rule_of
from app.tokens.templates import SPECIAL_TOKENS

_OWN_RENDERERS = frozenset(
    {
        "DeepseekV32ForCausalLM",
        "DeepseekV4ForCausalLM",
        "DeepseekV4ForConditionalGeneration",
        "DeepseekV41ForCausalLM",
        "GptOssForCausalLM",
        "InklingForCausalLM",
        "InklingForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
    }
)
"""Models whose chats vLLM renders in code, not by the template in their folder."""
_GENERIC = frozenset({None, "PreTrainedTokenizerFast", "TokenizersBackend"})
"""Classes of tokenizers that have no special tokens but those in the files."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Contents of a model's files. templates: sources, by name; without "default", chats cannot be
    rendered, and `why_no_template` says why. special_tokens: by name (bos_token). unsure: names of
    special tokens that the tokenizer's class may define. media_rule: tokens of an image; None:
    these files do not tell."""

    tokenizer: tokenizers.Tokenizer
    templates: Mapping[str, str]
    why_no_template: str
    special_tokens: Mapping[str, str]
    unsure: frozenset[str]
    media_rule: Rule | None


def folder_of(source: str) -> Path:
    """Returns the folder with the files. source: a folder, or a name in the local Hugging Face
    cache. Raises TokenizerUnavailable."""
    folder = Path(source)
    if (folder / "tokenizer.json").is_file():
        return folder
    if folder.is_dir():
        raise TokenizerUnavailable(f"{source}: has no tokenizer.json")
    # Takes longer to import than all the rest, and few need it.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(source, "tokenizer.json")
    except HFValidationError:
        path = None
    if not isinstance(path, str):
        raise TokenizerUnavailable(
            f"{cut(source)}: neither a folder with a tokenizer.json, nor in the local "
            "Hugging Face cache"
        )
    return Path(path).parent


def read(folder: Path) -> ModelFiles:
    """Returns the contents of a folder's files. Raises TokenizerUnavailable."""
    if other := [*folder.glob("tekken.json"), *folder.glob("tokenizer.model.v*")]:
        raise TokenizerUnavailable(f"{other[0]}: engines read this instead of tokenizer.json")
    config = _json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _json(folder / "special_tokens_map.json")
    templates, why_not = _templates(folder, config)
    special_tokens = _special_tokens(config)
    tokenizer = _tokenizer(folder, config, special_tokens)
    is_generic = config.get("tokenizer_class") in _GENERIC
    unsure = frozenset() if is_generic else frozenset(SPECIAL_TOKENS) - config.keys()
    preprocessor = _json(folder / "preprocessor_config.json")
    media_rule = rule_of(preprocessor, _json(folder / "config.json"))
    return ModelFiles(tokenizer, templates, why_not, special_tokens, unsure, media_rule)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TokenizerUnavailable(f"{path}: cannot be read: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    text = _text(path)
    if text is None:
        return {}
    try:
        content = orjson.loads(text)
    except ValueError as error:
        raise TokenizerUnavailable(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise TokenizerUnavailable(f"{path}: is not an object")
    return content


def _templates(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Returns chat templates by name; without a default one, also why."""
    architectures = _json(folder / "config.json").get("architectures") or ()
    if own := _OWN_RENDERERS.intersection(map(str, architectures)):
        return {}, f"engines render chats of {', '.join(own)} in code"
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    templates = {name: text for name, path in files.items() if (text := _text(path)) is not None}
    if not templates:
        given = config.get("chat_template")
        if isinstance(given, str):
            templates = {"default": given}
        elif isinstance(given, list):
            templates = {item["name"]: item["template"] for item in given}
    processor = _json(folder / "chat_template.json").get("chat_template")
    if processor is not None and processor != templates.get("default"):
        return {}, "its processor has another template than its tokenizer"
    return templates, "" if "default" in templates else "the model has no chat template"


def _content(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named |= extra
    return {name: text for name, token in named.items() if (text := _content(token)) is not None}


def _tokenizer(
    folder: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        listed = config.get("added_tokens_decoder", {})
        for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
            if token["content"] not in known:
                tokenizer.add_tokens([AddedToken(**token)])
                known.add(token["content"])
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
        contents = [*special_tokens.values(), *map(_content, extra or ())]
        for content in contents:
            if content is not None and content not in known:
                tokenizer.add_tokens([AddedToken(content, special=True)])
                known.add(content)
    # The library raises plain Exception for what it cannot read.
    except Exception as error:
        raise TokenizerUnavailable(f"{path}: cannot be read: {error}") from error
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    return tokenizer
