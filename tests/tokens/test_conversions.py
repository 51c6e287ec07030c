"""What of other APIs is left to the engine, as only it can tell what it makes of that."""

import pytest

from app.tokens import Unrenderable, chat_of_messages, chat_of_response
from app.tokens.anthropic import Habits

USER = {"role": "user", "content": "hello"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
TOOL = {"name": "find", "input_schema": {}}
MERGES = Habits(merges_systems=True, effort_without_thoughts="none")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": [USER, {"role": "system", "content": "x"}]}, "message"),
        ({"messages": [USER], "thinking": {"type": "disabled"}}, "reasoning_effort"),
    ],
)
def test_what_depends_on_the_template_is_left_to_the_engine_until_that_is_known(body, reason):
    with pytest.raises(Unrenderable) as caught:
        chat_of_messages(body, None)
    assert caught.value.reason == reason
    assert chat_of_messages(body, MERGES)["messages"][-1] == USER


def said(*blocks, role="user"):
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "message"),
        ({"messages": "x"}, "message"),
        ({"messages": [7]}, "message"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "message"),
        ({"messages": [USER, {"role": "system", "content": 7}]}, "message"),
        ({"messages": [{"role": "user", "content": 7}]}, "message"),
        ({"messages": [USER], "system": [IMAGE]}, "media"),
        (said(IMAGE), "media"),
        (said({"type": "text", "text": 7}), "message"),
        (said({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}), "media"),
        (said({"type": "tool_use", "id": "a", "name": "f", "input": []}), "media"),
        (said({"type": "tool_use", "name": "f", "input": {}}, role="assistant"), "message"),
        (said({"type": "tool_use", "id": "a", "input": {"n": 1e20}}, role="assistant"), "tools"),
        ({"messages": [USER], "thinking": {"type": "forced"}}, "reasoning_effort"),
        ({"messages": [USER], "thinking": 7}, "reasoning_effort"),
        ({"messages": [USER], "output_config": 7}, "refused"),
        (said({"type": "tool_removal", "tool": 7}, role="system"), "tools"),
        (
            said({"type": "tool_addition", "tool": {"type": "tool_definition"}}, role="system"),
            "message",
        ),
        ({"messages": [USER], "tools": [{"name": "web", "type": "web_search"}]}, "tools"),
        ({"messages": [USER], "tool_choice": "auto"}, "tool_choice"),
    ],
)
def test_messages_of_other_forms_are_not_converted(body, reason):
    with pytest.raises(Unrenderable) as caught:
        chat_of_messages(body, MERGES)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "message"),
        ({"input": [7]}, "message"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "truncation": None}, "truncation"),
        ({"input": "x", "prompt": {"id": "p"}}, "message"),
        ({"input": "x", "previous_input_messages": []}, "message"),
        ({"input": "x", "reasoning": 7}, "refused"),
        ({"input": "x", "instructions": 7}, "message"),
        ({"input": "x", "tools": [{"type": "custom", "format": {"type": "grammar"}}]}, "tools"),
        ({"input": "x", "tools": [{"type": 7}]}, "tools"),
        ({"input": "x", "tools": 7}, "tools"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "media"),
        ({"input": [{"role": "critic", "content": "x"}]}, "message"),
        ({"input": [{"role": "user", "content": "x", "mood": "y"}]}, "message"),
        ({"input": [{"role": "assistant", "content": []}]}, "message"),
        ({"input": [{"role": "assistant", "content": "x", "status": "incomplete"}]}, "message"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "message"),
        ({"input": [{"type": "reasoning", "summary": [7]}]}, "message"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "message"),
        ({"input": [{"type": "function_call", "name": "f", "namespace": "n"}]}, "message"),
        (
            {"input": [{"type": "function_call_output", "output": [{"type": "input_image"}]}]},
            "media",
        ),
        ({"input": [{"type": "web_search_call", "id": "a"}]}, "message"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "message"),
    ],
)
def test_responses_of_other_forms_are_not_converted(body, reason):
    with pytest.raises(Unrenderable) as caught:
        chat_of_response(body)
    assert caught.value.reason == reason


def test_what_only_an_engine_renders_goes_into_the_chat_that_it_is_asked_for():
    body = {
        "messages": [USER],
        "chat_template_kwargs": {"a": 1},
        "output_config": {"effort": "low", "format": {"type": "json_schema"}},
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "find"},
    }
    chat = chat_of_messages(body, None)
    assert chat["chat_template_kwargs"] == {"a": 1}
    assert chat["reasoning_effort"] == "low"
    assert chat["response_format"] == {"type": "json_schema"}
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "find"}}
    chat = chat_of_response({"input": "x", "reasoning": {"effort": "high"}})
    assert chat == {"messages": [USER | {"content": "x"}], "reasoning_effort": "high"}
