"""JSON bodies that a server has to read to the end: drawn from its schema, or valid but extreme."""

import json
import string

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from app.policy.policies import POLICIES
from tests.e2e.conftest import BLOCK_SIZE

COMPLETION_PROMPTS = [{"type": "array", "items": {"type": "integer", "minimum": 0}}]
COMPLETION = {
    "required": ["prompt"],
    "properties": {
        "prompt": COMPLETION_PROMPTS[0],
        "max_tokens": {"type": "integer", "minimum": 0, "maximum": 4},
        "stream": {"type": "boolean"},
        "stream_interval": {"type": "integer"},
        "request_id": {"type": "string"},
        "ignore_eos": {"type": "boolean"},
        "temperature": {"type": "number"},
        "top_p": {"type": "number"},
        "top_k": {"type": "integer"},
        "seed": {"type": "integer"},
    },
}
"""The bodies that a worker takes. More tokens would only take longer."""

_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "user", "assistant", "tool", "developer"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "type": {"enum": ["text", "image_url", "input_text", "tool_use"]},
                            "text": {"type": "string"},
                        },
                    },
                },
            ]
        },
        "tool_calls": {"type": "array", "items": {"type": "object", "properties": {}}},
    },
}
_MESSAGES = {"type": "array", "items": _MESSAGE}


def door_schemas(model):
    """Path -> what the front door takes there, which has no OpenAPI description."""
    common = {
        "stream": {"type": "boolean"},
        "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
        "max_tokens": {"type": "integer", "minimum": 0, "maximum": 4},
        "tools": {"type": "array", "items": {"type": "object", "properties": {}}},
        "session_id": {"type": "string"},
        "cache_salt": {"type": "string"},
        "n": {"type": "integer"},
        "chat_template": {"type": "string"},
        "kv_transfer_params": {"type": "object", "properties": {}},
    }
    inputs = {
        "/v1/chat/completions": {"messages": _MESSAGES},
        "/v1/completions": {"prompt": {"anyOf": [*_TEXTS["anyOf"], *COMPLETION_PROMPTS]}},
        "/v1/messages": {"messages": _MESSAGES, "system": _TEXTS},
        "/v1/messages/count_tokens": {"messages": _MESSAGES, "system": _TEXTS},
        "/v1/responses": {"input": {"anyOf": [{"type": "string"}, _MESSAGES]}},
        "/v1/embeddings": {"input": _TEXTS},
        "/tokenize": {"messages": _MESSAGES, "prompt": {"type": "string"}},
        "/detokenize": {"tokens": COMPLETION_PROMPTS[0]},
    }
    return {
        path: {
            "required": ["model", *list(fields)[:1]],
            "properties": {"model": {"enum": [model]}, **fields, **common},
        }
        for path, fields in inputs.items()
    }


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=6,
)


def drawn(schema, count, seed):
    """Up to `count` bodies that hypothesis finds worth trying."""
    bodies = []

    @seeded(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(_objects(schema))
    def collect(value):
        bodies.append(json.dumps(value).encode())

    collect()
    return bodies


def _objects(schema):
    """Objects with some of the schema's fields; a value in sixteen is of any other type."""
    odds = st.integers(0, 15)
    fields = {
        name: odds.flatmap(lambda odd, field=field: _values(field) if odd else ANYTHING)
        for name, field in schema["properties"].items()
    }
    required = {name: fields.pop(name) for name in schema.get("required", ())}
    return st.fixed_dictionaries(required, optional=fields)


def _values(schema):
    if "anyOf" in schema:
        return st.one_of([_values(option) for option in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema["type"]:
        case "object" if "properties" not in schema:
            return st.dictionaries(st.text(max_size=8), ANYTHING, max_size=4)
        case "object":
            return _objects(schema)
        case "integer":
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        case "array":
            return st.lists(_values(schema["items"]), max_size=40)
        case "string" if "pattern" in schema:
            return st.from_regex(schema["pattern"], fullmatch=True)
        case "string":
            return st.text()
        case "number":
            return st.floats()
        case "boolean":
            return st.booleans()
    assert schema["type"] == "null", schema
    return st.none()


def valid_body(rng, path, model=""):
    """A body that a server accepts, with values at their limits. model: the front door's; "": it
    is for another part."""
    if model:
        return _for_the_door(rng, path, model)
    blocks = rng.choice((0, 1, 2, 40, 400))
    tokens = [rng.choice((0, 2**32 - 1, rng.getrandbits(32))) for _ in range(blocks * 16 + 3)]
    if path == "/v1/completions":
        stream = rng.random() < 0.5
        fields = {"prompt": tokens, "max_tokens": rng.randint(1, 4)}
        return json.dumps(fields | {"stream": stream, "stream_interval": 2**62}).encode()
    hashes = [
        rng.choice((-(2**63), 2**64 - 1, "F" * 16, rng.getrandbits(64))) for _ in range(blocks)
    ]
    fields = {
        "local_hashes": hashes,
        "num_tokens": max(1, BLOCK_SIZE * blocks + rng.choice((0, 15))),
    }
    if path == "/find_best_worker":
        return json.dumps(fields).encode()
    if rng.random() < 0.5:
        fields = {"token_ids": tokens, "lora_name": "\0\ud800", "cache_namespace": "x" * 10_000}
    fields |= {
        "request_id": "".join(rng.choices(string.printable[:94], k=128)),
        "policy": rng.choice(sorted(POLICIES)),
        "exclude": rng.choice(([], ["w0"], ["\n"] * 4096, ["\ud800"])),
        "priority": rng.choice(("high", "normal", "low")),
        "tenant": "".join(rng.choices(string.printable[:94], k=64)),
        "reserve": rng.random() < 0.8,
        "explain": rng.random() < 0.2,
    }
    return json.dumps(fields).encode()


def _for_the_door(rng, path, model):
    words = " ".join(rng.choices(("\ud83d\ude00", "<|im_start|>", "x" * 1000, "\0", "word"), k=40))
    fields = {"model": model, "max_tokens": rng.randint(1, 4)}
    messages = [{"role": rng.choice(("user", "system")), "content": words} for _ in range(20)]
    match path:
        case "/v1/completions":
            fields |= {"prompt": rng.choice((words, [0, 1], [[2, 3]]))}
        case "/v1/embeddings":
            fields |= {"input": words}
        case "/v1/responses":
            fields |= {"input": rng.choice((words, messages))}
        case "/detokenize":
            fields |= {"tokens": [1, 2, 3]}
        case _:
            fields |= {"messages": messages}
    if rng.random() < 0.5:
        fields["stream"] = True
    return json.dumps(fields).encode()
