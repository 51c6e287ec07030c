"""make_model.py FOLDER: writes a Llama of 2 layers and two adapters for it, all without sense.

Its weights are random, always the same, and so large that what it says depends on every token
before: with vLLM's own --load-format dummy, all prompts get one and the same answer.

Run by the engine's own Python, which has tokenizers, torch and safetensors.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 128, 2, 4, 2, 32, 512
TEXT = "the quick brown fox jumps over the lazy dog " * 20
SHARPNESS = 3.0
"""Sharper attention and choices depend on less of what was said before,
duller ones on none of it in particular."""
ROLES = ["<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}{{ '<|system|>' + (tools | tojson) + eos_token }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ m['content'] }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_json(path, content):
    path.write_text(json.dumps(content))


def make_model(folder):
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<s>", "</s>", *ROLES],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": 4096,
            "chat_template": TEMPLATE,
        },
    )
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    )
    texts = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
    words = [
        token
        for token, text in enumerate(texts)
        if text.strip() and text.isprintable() and text.isascii()
    ]
    save_file(model_weights(words), str(folder / "model.safetensors"), {"format": "pt"})


def model_weights(words):
    """words: the tokens that it says; it does not end by itself."""
    generator = torch.Generator().manual_seed(1)

    def random(rows, columns, size=1.0):
        return torch.randn(rows, columns, generator=generator) * size / columns**0.5

    head = torch.zeros(VOCABULARY, HIDDEN)  # no logit of 0 is ever the highest
    head[words] = random(len(words), HIDDEN, SHARPNESS)
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN, SHARPNESS),
            f"{at}.self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN, SHARPNESS),
            f"{at}.self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN, SHARPNESS),
            f"{at}.self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM, SHARPNESS),
            f"{at}.mlp.gate_proj.weight": random(2 * HIDDEN, HIDDEN),
            f"{at}.mlp.up_proj.weight": random(2 * HIDDEN, HIDDEN),
            f"{at}.mlp.down_proj.weight": random(HIDDEN, 2 * HIDDEN),
            f"{at}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{at}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    return weights


def make_adapter(folder, seed):
    folder.mkdir(parents=True)
    rank, generator = 8, torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, width in (("q_proj", HEADS * HEAD_DIM), ("v_proj", KV_HEADS * HEAD_DIM)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(rank, HIDDEN, generator=generator)
            weights[f"{at}.lora_B.weight"] = torch.randn(width, rank, generator=generator)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "base_model_name_or_path": "tiny",
            "r": rank,
            "lora_alpha": rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": ["q_proj", "v_proj"],
            "task_type": "CAUSAL_LM",
        },
    )


if __name__ == "__main__":
    make_model(Path(sys.argv[1]) / "model")
    make_adapter(Path(sys.argv[1]) / "adapter", 1)
    make_adapter(Path(sys.argv[1]) / "other-adapter", 2)
