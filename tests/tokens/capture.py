"""Records what vLLM makes of chats: the expectations of test_exactness.py.

    python -m tests.tokens.models FOLDER
    for family in chatml llama qwen parts; do
        cp CONFIG FOLDER/$family/config.json    # of any small Llama, with vocab_size 1000
        vllm launch render FOLDER/$family --served-model-name m --port 8500 \\
            --enable-auto-tool-choice --tool-call-parser hermes
        python -m tests.tokens.capture FOLDER/$family http://127.0.0.1:8500
    done

writes chats.json, messages.json and responses.json to that folder: bodies, with the ids that
each API's render answers; null: it refuses. And agents.json: the ids of what is in agents.jsonl
beside the folders of tests/data/door, in its order.
"""

import json
import sys
from pathlib import Path

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


def text(*texts):
    return [{"type": "text", "text": one} for one in texts]


def with_function(**more):
    function = PRICE["function"]
    return {"type": "function", "function": function | more}


def with_arguments(arguments):
    call = CALL | {"function": {"name": "price", "arguments": arguments}}
    return {"messages": [USER, CALLED | {"tool_calls": [call]}, RESULT], "tools": [PRICE]}


NAMED = {"type": "tool_reference", "name": "price"}
BODIES = [
    {"messages": [USER]},
    {"messages": [SYSTEM, USER, ANSWER, {"role": "user", "content": "Größe? 你好 🙂\r\n\tnaïve"}]},
    {"messages": [USER], "add_generation_prompt": False},
    {"messages": [USER, ANSWER], "add_generation_prompt": False, "continue_final_message": True},
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
    *({"messages": [USER], "reasoning_effort": effort} for effort in ("none", "low", "max", "x")),
    {"messages": [SYSTEM, USER], "chat_template_kwargs": {"enable_thinking": False, "unused": 1}},
    {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}}
    | {"reasoning_effort": "none"},
    {"messages": [USER], "chat_template_kwargs": {"add_generation_prompt": False}},
    {"messages": [USER], "chat_template_kwargs": {"chat_template": "x"}},
    {"messages": [USER], "tools": [PRICE | {"defer_loading": True}, BARE]},
    {"messages": [USER], "tools": [with_function(defer_loading=True), with_function(strict=True)]},
    {"messages": [USER], "response_format": {"type": "json_object"}},
    {"messages": [USER, CALLED, RESULT | {"content": [NAMED, *text("x", ""), NAMED]}, USER]},
    {"messages": [{"role": "user", "content": [NAMED, *text("x")]}]},
    {"messages": []},
]


SEARCH = {"type": "tool_use", "id": "toolu_1", "name": "price", "input": {"of": ["a", 1.5], "n": 7}}
FOUND = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "free €"}
REFERENCE = {"type": "tool_reference", "tool_name": "price"}
ASKED_FOR = {"type": "thinking", "thinking": "Hm.\n", "signature": "x"}
SCHEMA = {"properties": {"of": {"type": "string"}}, "required": ["of"]}
PRICED = {"name": "price", "description": "What it costs", "input_schema": SCHEMA}
NOW = {"name": "now", "input_schema": {"type": "object"}, "strict": True}
CACHED = {"cache_control": {"type": "ephemeral"}}


def said(*blocks, role="assistant"):
    return {"role": role, "content": list(blocks)}


REMINDER = {"role": "system", "content": "<reminder>\nBe kind.</reminder>"}


def changed(kind, name):
    return said({"type": kind, "tool": {"type": "tool_reference", "name": name}}, role="system")


def defined(tool):
    change = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}}
    return said(*text("More tools."), change, role="system")


MESSAGES = [
    {"messages": [USER]},
    {"system": "  Be brief.\n", "messages": [USER, ANSWER, USER], "stream": True},
    {"system": [*text("x-anthropic-billing-header: 1"), {**text("a")[0], **CACHED}, *text("b")]}
    | {"messages": [said(*text("one"), role="user")], "metadata": {"user_id": "u"}},
    {"system": "x-anthropic-billing-header: 1\nRest", "messages": [USER]},
    {"messages": [said(*text("a", "", "b"), role="user"), said(*text("c", "d")), USER]},
    {"messages": [USER, said(ASKED_FOR, *text("So."), SEARCH), said(FOUND, role="user")]}
    | {"tools": [PRICED, NOW]},
    {"messages": [USER, said(SEARCH), said(FOUND, *text("and?"), role="user")]}
    | {"tools": [PRICED], "tool_choice": {"type": "auto"}},
    {"messages": [USER, said(*text("Look:"), SEARCH | {"input": {}}, SEARCH)]}
    | {"tools": [PRICED], "tool_choice": {"type": "none"}},
    {"messages": [USER, said(SEARCH), said(FOUND | {"content": text("x", "y")}, role="user")]},
    {"messages": [USER, said(SEARCH), said(FOUND | {"content": None}, FOUND, role="user"), USER]},
    {"messages": [USER, said({"type": "redacted_thinking", "data": "x"}), USER]},
    {"messages": [USER, ANSWER], "thinking": {"type": "adaptive"}, "temperature": 0.5},
    {"messages": [said(role="user"), USER]},
    {"messages": [said(role="assistant"), USER]},
    {"system": "Be brief.", "messages": [USER, REMINDER, ANSWER, USER]},
    {
        "messages": [
            USER,
            ANSWER,
            said(*text("a", "x-anthropic-billing-header: 1", "b"), role="system"),
        ]
    },
    {
        "messages": [
            REMINDER,
            USER,
            REMINDER | {"content": "x-anthropic-billing-header: 1"},
            ANSWER,
            USER,
        ]
    },
    {"messages": [USER, said(role="system"), ANSWER, USER]},
    *({"messages": [USER], "thinking": {"type": kind}} for kind in ("disabled", "adaptive")),
    {
        "messages": [USER],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "max_tokens": 2000,
    },
    {"messages": [USER], "thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
    {"messages": [USER], "output_config": {"effort": "low"}},
    {"messages": [USER], "tools": [PRICED | {"defer_loading": True}, NOW | CACHED]},
    {"messages": [USER], "tools": [PRICED | {"type": "custom", "eager_input_streaming": True}]},
    {"messages": [USER, changed("tool_addition", "price"), USER]}
    | {"tools": [NOW, PRICED | {"defer_loading": True}]},
    {"messages": [USER, changed("tool_removal", "price"), USER], "tools": [PRICED, NOW]},
    {"messages": [USER, defined(PRICED), ANSWER, USER], "tools": [NOW]},
    {
        "messages": [
            USER,
            defined(PRICED),
            changed("tool_removal", "now"),
            changed("tool_addition", "now"),
        ]
    }
    | {"tools": [NOW]},
    {"messages": [USER, changed("tool_removal", "unknown"), USER], "tools": [PRICED]},
    {"messages": [USER], "tools": [{"name": "web_search", "type": "web_search_20250305"}]},
    {"messages": [USER], "context_management": {"edits": []}, "metadata": {"user_id": "u"}},
    {"messages": [USER], "tools": []},
    {
        "messages": [USER],
        "tools": [],
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    },
    {"messages": [USER, said(SEARCH), said(FOUND | {"content": [REFERENCE]}, role="user")]}
    | {"tools": [PRICED | {"defer_loading": True}]},
    {
        "messages": [
            USER,
            said(SEARCH),
            said(
                FOUND | {"content": [*text("a"), REFERENCE, *text("b"), REFERENCE]},
                REFERENCE,
                *text("c"),
                role="user",
            ),
        ]
    },
    {"messages": []},
]
QUESTION = {"role": "user", "content": [{"type": "input_text", "text": "What for?"}]}
REPLY = {
    "type": "message",
    "role": "assistant",
    "id": "msg_1",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Nothing. \n", "annotations": []}],
}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "status": "completed"}
THOUGHT |= {"content": [{"type": "reasoning_text", "text": "Hm.\n"}]}
REQUEST = {"type": "function_call", "call_id": "call_1", "name": "price"}
REQUEST |= {"arguments": '{"unit": "€/h", "of": ["a", 1.50]}', "id": "fc_1", "status": "completed"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "free €"}
FLAT = {"type": "function", **PRICE["function"]}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Change files"}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCHED = {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "é\n+"}
PATCHED_SO = {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done"}
NAMESPACE = {"type": "namespace", "name": "shop", "description": "A shop", "tools": [FLAT]}
RESPONSES = [
    {"input": "What does kvroute cost?"},
    {"input": [USER], "instructions": "  You are brief.\n", "stream": True, "store": False},
    {"input": [USER, ANSWER, USER]},
    {"input": [SYSTEM, QUESTION, REPLY, {"type": "message", **QUESTION}]},
    {"input": [{"role": "developer", "content": "Be kind."}, QUESTION]},
    {"input": [QUESTION, THOUGHT, REPLY, QUESTION]},
    {"input": [QUESTION, THOUGHT | {"content": None, "summary": [{"type": "summary_text"}]}]},
    {"input": [QUESTION, THOUGHT, REQUEST, OUTPUT], "tools": [FLAT | {"strict": True}]},
    {"input": [QUESTION, REPLY, REQUEST, REQUEST, OUTPUT, OUTPUT, REPLY, QUESTION]}
    | {"tools": [FLAT | {"strict": False}], "tool_choice": "none"},
    {"input": [QUESTION, REPLY, REPLY, QUESTION]},
    {
        "input": [
            QUESTION,
            {k: REQUEST[k] for k in ("type", "call_id", "name", "arguments")},
            OUTPUT,
        ]
    },
    {"input": "x", "tools": [], "truncation": "disabled", "reasoning": {"effort": None}},
    {"input": [{"role": "user", "content": [*QUESTION["content"], *QUESTION["content"]]}]},
    {"input": [QUESTION, THOUGHT | {"content": None}, REPLY, QUESTION]},
    {"input": [QUESTION, {"type": "reasoning", "id": "rs_2", "summary": []}, REQUEST, OUTPUT]},
    {"input": [QUESTION, THOUGHT | {"encrypted_content": "x"}, REPLY, QUESTION]},
    {"input": [QUESTION, REPLY | {"content": [*REPLY["content"], *REPLY["content"]]}, QUESTION]},
    {"input": [REPLY | {"phase": "commentary"}, REPLY | {"phase": "final_answer"}, QUESTION]},
    {
        "input": [
            QUESTION,
            REQUEST,
            OUTPUT | {"output": [*QUESTION["content"], *QUESTION["content"]]},
        ]
    },
    {"input": [QUESTION], "tools": [{"type": "web_search"}, FLAT, PATCH]},
    {"input": [QUESTION], "tools": [{"type": "web_search"}]},
    {"input": [QUESTION], "tools": [PATCH | {"format": {"type": "text"}}]},
    {"input": [QUESTION], "tools": [FLAT, PATCH | {"format": GRAMMAR}]},
    {"input": [QUESTION], "tools": [NAMESPACE, FLAT | {"defer_loading": True}]},
    {"input": [QUESTION, REQUEST | {"namespace": "shop"}, OUTPUT, PATCHED, PATCHED_SO, QUESTION]}
    | {"tools": [NAMESPACE, PATCH]},
    {"input": "x", "tools": [FLAT], "tool_choice": "auto", "parallel_tool_calls": True},
    *({"input": "x", "reasoning": {"effort": e, "summary": "auto"}} for e in ("none", "medium")),
    {"input": "x", "include": ["reasoning.encrypted_content"], "client_metadata": {"a": "b"}},
    {"input": "x", "text": {"verbosity": "low"}, "prompt_cache_key": "k"},
    {"input": []},
]


AGENTS = Path(__file__).parents[1] / "data/door/agents.jsonl"


def agents():
    """Path and body of what coding agents sent: see tests/clients/record.py."""
    lines = map(json.loads, AGENTS.read_text().splitlines())
    return [(line["path"], line["body"]) for line in lines]


def rendered(url, path, body):
    answer = httpx.post(f"{url}{path}/render", json=body | {"model": "m"}, timeout=30)
    assert answer.status_code in (200, 400), answer.text
    return answer.json()["token_ids"] if answer.status_code == 200 else None


def main(folder, url):
    for name, path, bodies in (
        ("chats", "/v1/chat/completions", BODIES),
        ("messages", "/v1/messages", MESSAGES),
        ("responses", "/v1/responses", RESPONSES),
    ):
        cases = []
        for body in bodies:
            whole = {"max_tokens": 9, **body} if name == "messages" else body
            cases.append([body, rendered(url, path, whole)])
        lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
        (folder / f"{name}.json").write_text(f"[\n{lines}\n]\n")
    lines = ",\n".join(json.dumps(rendered(url, path, body)) for path, body in agents())
    (folder / "agents.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
