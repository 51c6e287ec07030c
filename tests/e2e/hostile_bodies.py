"""JSON bodies that a server has to read to the end: drawn from its schema, or valid but extreme."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Mapping
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from app.policy.cost import POLICIES
from tests.e2e.conftest import BLOCK_SIZE

COMPLETION = {
    "required": ["prompt"],
    "properties": {
        "prompt": {"type": "array", "items": {"type": "integer", "minimum": 0}},
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
"""What a worker takes, which has no OpenAPI description. More tokens would only take longer."""

ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=6,
)


def drawn(schema: Mapping[str, Any], count: int, seed: int) -> list[bytes]:
    """Up to `count` bodies that hypothesis finds worth trying."""
    bodies: list[bytes] = []

    @seeded(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(_objects(schema))
    def collect(value: Any) -> None:
        bodies.append(json.dumps(value).encode())

    collect()
    return bodies


def _objects(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Objects with some of the schema's fields; a value in sixteen is of any other type."""
    odds = st.integers(0, 15)
    fields = {
        name: odds.flatmap(lambda odd, field=field: _values(field) if odd else ANYTHING)
        for name, field in schema["properties"].items()
    }
    required = {name: fields.pop(name) for name in schema.get("required", ())}
    return st.fixed_dictionaries(required, optional=fields)


def _values(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "anyOf" in schema:
        return st.one_of([_values(option) for option in schema["anyOf"]])
    match schema["type"]:
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


def valid_body(rng: random.Random, path: str) -> bytes:
    """A body that a server accepts, with values at their limits."""
    blocks = rng.choice((0, 1, 2, 40, 400))
    tokens = [rng.choice((0, 2**32 - 1, rng.getrandbits(32))) for _ in range(blocks * 16 + 3)]
    if path == "/v1/completions":
        stream = rng.random() < 0.5
        fields: dict[str, Any] = {"prompt": tokens, "max_tokens": rng.randint(1, 4)}
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
