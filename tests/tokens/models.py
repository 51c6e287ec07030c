"""Small models to render for: tokenizers of the kinds that there are, and families of templates."""

import json
from pathlib import Path

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = (Path(__file__).parents[2] / "LICENSE").read_text().splitlines()[:120]
DATA = Path(__file__).parents[1] / "data/door"
FAMILIES = ("chatml", "llama", "qwen", "parts")
"""Folders of DATA, with tokenizers of byte_level (chatml, qwen), split_bytes and metaspace."""
CHATML = json.loads((DATA / "chatml/tokenizer_config.json").read_text())["chat_template"]
WORDS = r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_level(*special, add_prefix_space=False):
    """As GPT-2 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, special)


def split_bytes(*special):
    """As Llama 3: words by a regular expression, a begin of text added."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _trained(tokenizer, special)
    tokenizer.post_processor = _with_start(tokenizer, special[0])
    return tokenizer


def metaspace(*special, prepend_scheme="first"):
    """As Mistral and Llama 2: a mark for spaces; where `prepend_scheme` says, one before a text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *special], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = _with_start(tokenizer, special[0])
    return tokenizer


def normalizing(*special):
    """Lower case, compatible forms, white space stripped, and a space before each text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Lowercase(),
            normalizers.Strip(left=False, right=True),
            normalizers.Prepend("▁"),
            normalizers.Replace(" ", "▁"),
        ]
    )
    return _trained(tokenizer, ("<unk>", *special))


def _trained(tokenizer, special):
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _with_start(tokenizer, start):
    start_id = tokenizer.token_to_id(start)
    return processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, start_id)]
    )


def save(folder, tokenizer, template=None, **config):
    """A folder with a tokenizer, and its config unless that would be empty."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    if template is not None:
        config["chat_template"] = template
    if config:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder
