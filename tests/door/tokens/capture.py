"""Records what vLLM makes of chats: the expectations of test_exactness.py.

    python -m tests.door.tokens.models FOLDER
    for family in chatml llama qwen parts; do
        cp CONFIG FOLDER/$family/config.json    # of any small Llama, with vocab_size 1000
        vllm launch render FOLDER/$family --served-model-name m --port 8500
        python -m tests.door.tokens.capture FOLDER/$family http://127.0.0.1:8500
    done

writes chats.json to that folder: bodies, with the ids that /tokenize answers; null: it refuses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx

USER = {"role": "user", "content": "What does kvroute cost?"}
SYSTEM = {"role": "system", "content": "  You are brief.\n"}
ANSWER = {"role": "assistant", "content": "Nothing, it is free. \n"}
CALL = {
    "index": 0,
    "function": {"name": "price", "arguments": '{"unit": "€/h", "of": ["a", 1.50, null]}'},
    "type": "function",
    "id": "call_1",
}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": '{"price": 0}'}
PRICE = {
    "function": {
        "parameters": {
            "type": "object",
            "required": ["of"],
            "properties": {"of": {"type": "string", "maxLength": 12}, "unit": {"enum": ["<€>"]}},
        },
        "description": "What something costs & why",
        "name": "price",
    },
    "type": "function",
}
BARE = {"type": "function", "function": {"name": "now", "strict": False, "unknown": 1}}


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": one} for one in texts]


def with_arguments(arguments: str) -> dict[str, Any]:
    call = CALL | {"function": {"name": "price", "arguments": arguments}}
    return {"messages": [USER, CALLED | {"tool_calls": [call]}, RESULT], "tools": [PRICE]}


BODIES: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": [SYSTEM, USER, ANSWER, {"role": "user", "content": "Größe? 你好 🙂\r\n\tnaïve"}]},
    {"messages": [USER], "add_generation_prompt": False},
    {
        "messages": [USER, ANSWER],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    {
        "messages": [USER, {"role": "assistant", "content": text("One", "two")}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    {"messages": [USER], "continue_final_message": True},
    {"messages": [{"role": "user", "content": text("a", "", "b")}]},
    {"messages": [{"role": "user", "content": ["plain", *text("and part")]}]},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "user", "content": ""}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [USER | {"name": "Ann"}, ANSWER | {"name": "Bot"}, USER]},
    {"messages": [USER], "tools": [PRICE, BARE]},
    {"messages": [SYSTEM, USER], "tools": [BARE], "tool_choice": "none"},
    {"messages": [SYSTEM, USER, CALLED, RESULT], "tools": [PRICE], "tool_choice": "auto"},
    {"messages": [USER, CALLED, RESULT | {"content": text("x", "", "y")}, RESULT, ANSWER, USER]},
    {"messages": [USER, CALLED | {"tool_calls": [CALL, CALL]}, RESULT]},
    {"messages": [USER, ANSWER | {"tool_calls": []}, USER]},
    *map(with_arguments, ("", "[1]", "{not JSON", '{"a": {"b": 12345678901234567890, "c": 1e5}}')),
    {"messages": [USER, ANSWER | {"reasoning_content": "Hm.\n"}, USER]},
    {"messages": [USER, ANSWER | {"reasoning": "So.", "annotations": [], "audio": None}]},
    {"messages": [{"role": "developer", "content": "Be kind."}, SYSTEM, USER]},
    {"messages": [{"role": "developer", "content": text("Be", "kind.")}, USER]},
    {"messages": [SYSTEM, USER, {"role": "system", "content": "Later."}, USER]},
    {"messages": [{"role": "system", "content": "x-anthropic-billing-header: 1\nRest"}, USER]},
    {"messages": [{"role": "system", "content": text("x-anthropic-billing-header: 1", "b")}, USER]},
    {"messages": [{"role": "critic", "content": "Why <|im_start|>user\n<s>[INST] so?"}]},
    {"messages": [{"role": "user", "content": " <|eot_id|> <think>\n</s>  <tool_call> "}]},
    {"messages": []},
]


def main(folder: Path, url: str) -> None:
    cases = []
    for body in BODIES:
        answer = httpx.post(f"{url}/tokenize", json={"model": "m", **body}, timeout=30)
        assert answer.status_code in (200, 400), answer.text
        cases.append([body, answer.json()["tokens"] if answer.status_code == 200 else None])
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (folder / "chats.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
