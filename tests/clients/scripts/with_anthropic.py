"""Anthropic's own client: with_anthropic.py URL MODEL"""

import sys

import anthropic

URL, MODEL = sys.argv[1:]
USER = {"role": "user", "content": "What is the weather in Oslo?"}
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WEATHER = {"name": "weather", "input_schema": PLACE}
ASKED = {"model": MODEL, "max_tokens": 1000, "system": "Be terse."}

with anthropic.Anthropic(base_url=URL, api_key="any", max_retries=0) as client:
    whole = client.messages.create(**ASKED, messages=[USER])
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**ASKED, messages=[USER]) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens

    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "weather"}):
        called = client.messages.create(
            **ASKED, messages=[USER], tools=[WEATHER], tool_choice=choice
        )
        assert called.stop_reason == "tool_use"
        assert isinstance(called.content[0].input["place"], str)
    with client.messages.stream(**ASKED, messages=[USER], tools=[WEATHER]) as stream:
        assert stream.get_final_message().content[0].input == called.content[0].input

    result = {"type": "tool_result", "tool_use_id": called.content[0].id, "content": "sunny"}
    turns = [
        USER,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    said = client.messages.create(**ASKED, messages=turns, tools=[WEATHER])
    assert said.content[0].type == "text"

    word = whole.content[0].text.split()[3]
    stopped = client.messages.create(**ASKED, messages=[USER], stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)

    count = client.messages.count_tokens(model=MODEL, system="Be terse.", messages=[USER])
    usage = whole.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens

    thinking = {"type": "enabled", "budget_tokens": 1024}
    thought = client.messages.create(
        **ASKED | {"max_tokens": 2000}, messages=[USER], thinking=thinking
    )
    assert thought.stop_reason == "end_turn"

    try:
        client.messages.create(
            **ASKED, messages=[USER], tools=[WEATHER], tool_choice={"type": "tool", "name": "other"}
        )
    except anthropic.BadRequestError as error:
        assert "other" in str(error)
    else:
        raise AssertionError("there is no such tool")
