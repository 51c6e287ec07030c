"""Facts that engines of each kind tell over HTTP, by path: bytes, an object, or a status."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

_VLLM = Path(__file__).parents[1] / "data" / "engines" / "vllm-0.32"
Answers = Mapping[str, Any]
VLLM = {
    f"/{path}": (_VLLM / name).read_bytes()
    for path, name in (
        ("version", "version.json"),
        ("v1/models", "models.json"),
        ("kv_event_sources", "kv_event_sources.json"),
        ("metrics", "metrics.txt"),
    )
}
SGLANG_INFO = {
    "version": "0.5.23",
    "page_size": 16,
    "dp_size": 2,
    "max_total_num_tokens": 65_536,
    "disable_radix_cache": False,
    "disaggregation_mode": "null",
    "kv_events_config": '{"publisher":"zmq","endpoint":"tcp://*:5557"}',
    "kv_events": {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "kv",
        "block_size": 32,
        "dp_size": 2,
        "replay_endpoint_port_base": 5657,
    },
}
SGLANG_MODELS = {
    "data": [
        {"id": "llama", "max_model_len": 8192},
        {"id": "poems", "parent": "llama", "max_model_len": None},
    ]
}
SGLANG = {"/server_info": SGLANG_INFO, "/v1/models": SGLANG_MODELS, "/ready": b""}


def sglang(**changes):
    """SGLang with these fields in /server_info."""
    return {**SGLANG, "/server_info": deepcopy(SGLANG_INFO) | changes}


def vllm_metrics(*changes):
    """VLLM with text replaced in /metrics."""
    text = VLLM["/metrics"]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return {**VLLM, "/metrics": text}


def cards(kind, models, adapters, limit, root):
    about = {"object": "model", "owned_by": kind, "created": 1, "max_model_len": limit}
    of_models = [about | {"id": name, "parent": None, "root": root or name} for name in models]
    of_adapters = [about | {"id": name, "parent": models[0]} for name in adapters]
    return {"object": "list", "data": of_models + of_adapters}


def exposed(model, started_s, config, gauges, counters):
    """The lines of vLLM's metrics. started_s: seconds since 1970."""
    labels = f'engine="0",model_name="{model}"'
    shown = ",".join(f'{name}="{value}"' for name, value in config.items())
    yield f"process_start_time_seconds {started_s}"
    yield f"vllm:cache_config_info{{{labels},{shown}}} 1.0"
    yield f'vllm:engine_sleep_state{{{labels},sleep_state="awake"}} 1.0'
    for name, value in (*gauges.items(), *counters.items()):
        yield f"vllm:{name}{{{labels}}} {value}"
