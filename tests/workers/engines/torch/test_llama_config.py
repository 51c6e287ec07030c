import json
from dataclasses import replace

import pytest
import transformers

from app.core.errors import ConfigError
from workers.engines.torch.llama_config import SIZES, LlamaConfig, RopeScaling


def config_file(folder, **changes):
    """A config.json as older versions of transformers wrote it; None leaves a setting out."""
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": 128_001,
    } | changes
    given = {name: value for name, value in settings.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(given))
    return folder


def test_a_config_of_older_transformers_is_read(tmp_path):
    assert LlamaConfig.from_checkpoint(config_file(tmp_path)) == replace(
        SIZES["llama-3.1-8b"], eos_token_ids=(128_001,)
    )


def test_a_config_of_newer_transformers_is_read(tmp_path):
    theirs = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        eos_token_id=[7, 9],
    )
    theirs.save_pretrained(tmp_path)
    assert LlamaConfig.from_checkpoint(tmp_path) == LlamaConfig(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=80,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_size=16,
        max_position_embeddings=256,
        rope_theta=1000.0,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32),
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        eos_token_ids=(7, 9),
    )


def test_settings_that_a_config_leaves_out_have_the_defaults_of_transformers(tmp_path):
    left_out = (
        *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
        *("rope_scaling", "hidden_act", "attention_bias", "tie_word_embeddings", "eos_token_id"),
    )
    config = LlamaConfig.from_checkpoint(config_file(tmp_path, **dict.fromkeys(left_out)))
    theirs = transformers.LlamaConfig(hidden_size=4096, num_attention_heads=32)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_size == theirs.head_dim
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.rope_scaling is None
    assert config.tie_word_embeddings is theirs.tie_word_embeddings
    assert config.eos_token_ids == ()


def test_the_generation_config_sets_the_end_of_sequence_tokens(tmp_path):
    config_file(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6}')
    assert LlamaConfig.from_checkpoint(tmp_path).eos_token_ids == (128_001,)
    path.write_text('{"eos_token_id": [128001, 128008, 128009]}')
    assert LlamaConfig.from_checkpoint(tmp_path).eos_token_ids == (128_001, 128_008, 128_009)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "mistral"}, "model_type: .*'mistral'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures: .*Sequence"),
        ({"attention_bias": True}, "attention_bias: .*True"),
        ({"mlp_bias": True}, "mlp_bias: .*True"),
        ({"hidden_act": "gelu"}, "hidden_act: .*'gelu'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: .*0\.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: .*fp8"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type: .*'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_parameters: factor is missing"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor: .*0\.5"),
        ({"rope_scaling": 3}, "rope_parameters: .*3"),
        ({"vocab_size": None}, "vocab_size: .*None"),
        ({"num_attention_heads": 0}, "num_attention_heads: .*0"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers: .*1000000"),
        ({"hidden_size": "4096"}, "hidden_size: .*'4096'"),
        ({"num_key_value_heads": 5}, "num_kv_heads: 32 heads cannot share 5"),
        ({"head_dim": 127}, "head_size: .*127"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: .*'small'"),
        ({"rope_theta": -1.0}, r"rope_theta: .*-1\.0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: .*no"),
        ({"eos_token_id": 128_256}, "eos_token_ids: .*128256"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_unsupported_setting_is_refused_by_name(changes, complaint, tmp_path):
    with pytest.raises(ConfigError, match=complaint):
        LlamaConfig.from_checkpoint(config_file(tmp_path, **changes))


def test_a_config_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        LlamaConfig.from_checkpoint(tmp_path)
    for text, complaint in (
        ("{", "cannot be read"),
        ("[" * 10**5, "cannot be read"),
        ("[]", "needs an object, got list"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=complaint):
            LlamaConfig.from_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"factor": 0}, "factor: .*0"),
        ({"high_freq_factor": 1.0}, "high_freq_factor: .*1.0"),
        ({"original_max_position_embeddings": 0.5}, r"original_max_position_embeddings: .*0\.5"),
    ],
)
def test_an_invalid_rope_scaling_is_refused(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        replace(RopeScaling(8.0, 1.0, 4.0, 8192), **changes)
