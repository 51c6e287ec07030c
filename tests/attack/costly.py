"""Bodies that are small, or within all limits, and take long to make sense of."""

import json

from workers.engines.sim.text import WORDS

MANY = 99_000
"""Just below what a body may have."""
LONG = "x" * 3_000_000
_CHATS, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def costly(model):
    user = [{"role": "user", "content": "x"}]
    chat = {"model": model, "messages": user, "max_tokens": 1}
    prompt = {"model": model, "max_tokens": 1}
    for name, schema in _schemas():
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        function = {"name": "f", "parameters": schema}
        yield f"schema: {name}", _CHATS, _dumps(chat | {"response_format": form})
        tools = [{"type": "function", "function": function}]
        body = _dumps(chat | {"tools": tools, "tool_choice": "required"})
        yield f"schema of a tool: {name}", _CHATS, body
        form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        yield (
            f"schema: {name}",
            "/v1/responses",
            _dumps({"model": model, "input": "x"} | {"text": form}),
        )
    for name, text in _texts():
        yield f"text: {name}", _COMPLETIONS, _dumps(prompt | {"prompt": text})
        yield (
            f"text: {name}",
            _CHATS,
            _dumps(chat | {"messages": [{"role": "user", "content": text}]}),
        )
    yield "many prompts", _COMPLETIONS, _dumps(prompt | {"prompt": ["a word"] * MANY})
    yield "many inputs", "/v1/embeddings", _dumps({"model": model, "input": ["a word"] * MANY})
    said = " ".join(WORDS) * 5
    stops = [said[:-cut] for cut in range(1, 17)]
    yield (
        "stops that nearly come",
        _CHATS,
        _dumps(chat | {"stop": stops, "n": 16, "max_tokens": 200}),
    )
    yield "many stops", _CHATS, _dumps(chat | {"stop": ["x"] * MANY})
    yield "biases", _CHATS, _dumps(chat | {"logit_bias": {f"{n}": 1.7e308 for n in range(MANY)}})
    yield "a regex", _CHATS, _dumps(chat | {"guided_regex": "(a*)*" * 1000 + "b"})
    yield "a grammar", _CHATS, _dumps(chat | {"structured_outputs": {"regex": "(a|a)*" * 1000}})
    for number in (9_999, 30_000):
        yield "many messages", _CHATS, _dumps(chat | {"messages": user * number})
        yield "many messages", "/v1/messages", _dumps(chat | {"messages": user * number})
        yield "many items", "/v1/responses", _dumps({"model": model, "input": user * number})
    arguments = json.dumps({"a": [[]] * 1_000_000})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    long = {"id": LONG, "type": "function", "function": {"name": LONG, "arguments": "{}"}}
    for name, each in (("arguments of a call", call), ("names of a call", long)):
        messages = [{"role": "assistant", "content": None, "tool_calls": [each]}]
        yield name, _CHATS, _dumps(chat | {"messages": messages})


def _schemas():
    for times in (20, 60):
        steps = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(times)}
        yield f"doubles {times} times", {"$ref": "#/$defs/d0", "$defs": steps}
    yield "itself", {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}
    deep = {}
    for _ in range(300):
        deep = {"anyOf": [deep]}
    yield "deep", deep
    names = [f"r{n}" for n in range(30_000)]
    yield "many names", {"type": "object", "required": names}
    yield "long arrays", {"type": "array", "minItems": 2000, "items": {"const": "x" * 50_000}}


def _texts():
    length = 1_000_000
    for piece in (
        " ",
        "a",
        "\n",
        "' ",
        "1",
        "!",
        "a1!",
        "\u0301",
        "\u6f22",
        "\ufdfa",
        "<|im_",
        "\U0001f469\u200d",
    ):
        yield ascii(piece), piece * (length // len(piece.encode()))


def _dumps(body):
    return json.dumps(body, ensure_ascii=False).encode()
