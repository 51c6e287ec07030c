"""Small checkpoints and tokenizers, made with Hugging Face's libraries."""

import json
from functools import cache

import torch
import transformers
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = """A stream of tokens is decoded as it comes; no half character, no wrong space.
日本語の文章と絵文字 👩‍👩‍👧 😀, и кириллица, ça et là.  Two spaces,	a tab
and "quotes" (as they are)."""
KINDS = "bytes", "sentencepiece"


@cache
def library(kind):
    """A byte-level tokenizer, like Llama 3's, or one with byte fallback, like Llama 2's."""
    trained = Library(models.BPE())
    special = ["<s>", "</s>", "<unk>"]
    if kind == "bytes":
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trained.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        trained.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        alphabet = []
    trained.train_from_iterator(
        [TEXT if kind == "bytes" else TEXT.splitlines()[0]],
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=special,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    if kind == "sentencepiece":
        described = json.loads(trained.to_str())
        vocabulary = described["model"]["vocab"]
        for byte in range(256):
            vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
        described["model"] |= {"byte_fallback": True, "unk_token": "<unk>"}
        trained = Library.from_str(json.dumps(described))
        trained.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    trained.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", trained.token_to_id("<s>"))]
    )
    return trained


def reference(**settings):
    """A small model whose weights all matter, including the norms'."""
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 96,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
            "eos_token_id": 7,
        }
        | settings
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model
