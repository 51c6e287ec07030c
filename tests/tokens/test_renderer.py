import asyncio
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import orjson
import pytest
import tokenizers

from app.core.hashing import PROBE, hash_of_probe, token_bytes
from app.tokens import Overloaded, TokenizerThreads, TokenizerUnavailable, Unrenderable, load
from app.tokens import messages as messages_module
from app.tokens import renderer as renderer_module
from app.tokens import templates as templates_module
from app.tokens.templates import ChatTemplate
from tests.tokens import models

DATA = Path(__file__).parents[1] / "data/door"
USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "now"}}
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


@pytest.fixture(scope="module")
def renderer():
    return load(str(DATA / "qwen"))


def model(folder, template=models.CHATML, **config):
    tokenizer = models.byte_level("<s>", "<|im_start|>", "<|im_end|>")
    return str(models.save(folder, tokenizer, template, **config))


def text_of(folder, ids):
    made = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    return made.decode(ids.tolist(), skip_special_tokens=False)


async def test_ids_are_ready_to_be_hashed_and_to_be_sent(renderer):
    ids = await renderer.of_text("Hello, world")
    assert token_bytes(ids) == b"".join(i.to_bytes(4, "little") for i in ids.tolist())
    assert orjson.loads(orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)) == ids.tolist()


async def test_a_long_prompt_has_the_ids_of_a_short_one_repeated(renderer):
    once = await renderer.of_text("Hello\n")
    assert (await renderer.of_text("Hello\n" * 1_000)).tolist() == once.tolist() * 1_000


async def test_the_tokenizer_adds_its_own_tokens_to_text_if_asked():
    llama = load(str(DATA / "llama"))
    bare = (await llama.of_text("Hello", add_special_tokens=False)).tolist()
    assert (await llama.of_text("Hello")).tolist() == [0, *bare]


async def test_the_fingerprint_is_the_hash_of_an_engine_that_tokenizes_alike():
    llama = load(str(DATA / "llama"))
    whole = tokenizers.Tokenizer.from_file(str(DATA / "llama/tokenizer.json"))
    assert llama.fingerprint == hash_of_probe(whole.encode(PROBE).ids)
    assert llama.fingerprint != load(str(DATA / "parts")).fingerprint


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"chat_template": "x"}, "template"),
        ({"chat_template_kwargs": {"tools": []}}, "template_kwargs"),
        ({"chat_template_kwargs": 7}, "template_kwargs"),
        ({"documents": []}, "documents"),
        ({"reasoning_effort": "utmost"}, "reasoning_effort"),
        ({"truncate_prompt_tokens": 0}, "truncation"),
        ({"add_special_tokens": True}, "special_tokens"),
        ({"echo": True}, "echo"),
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL | {"type": "web_search"}]}, "tools"),
        ({"tools": [{"function": {"name": "f", "parameters": {"max": 1e25}}}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"continue_final_message": True}, "refused"),
        ({"add_generation_prompt": "yes"}, "refused"),
        ({"messages": []}, "message"),
        ({"messages": None}, "message"),
        ({"messages": ["Hello"]}, "message"),
        ({"messages": [{"role": 1, "content": ""}]}, "message"),
        ({"messages": [USER | {"weight": 0}]}, "message"),
        ({"messages": [USER | {"tool_calls": [CALL]}]}, "message"),
        ({"messages": [USER | {"content": [{"type": "text"}]}]}, "message"),
        ({"messages": [USER | {"content": [{"type": "text", "text": "", "x": 1}]}]}, "message"),
        ({"messages": [USER | {"content": [{"type": "tool_reference"}]}]}, "message"),
        ({"messages": [USER | {"content": [{"type": "image_url", "image_url": {}}]}]}, "media"),
        ({"messages": [USER | {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "message"),
        ({"messages": [USER | {"content": "\ud800"}]}, "text"),
    ],
)
async def test_what_only_the_engine_can_judge_is_refused_with_the_reason(renderer, fields, reason):
    with pytest.raises(Unrenderable) as refused:
        await renderer.of_chat({"messages": [USER]} | fields)
    assert refused.value.reason == reason


async def test_members_that_change_nothing_are_no_hindrance(renderer):
    nothing = {
        "chat_template": None,
        "chat_template_kwargs": {},
        "documents": None,
        "echo": False,
        "response_format": {"type": "json_object"},
        "tool_choice": "none",
        "temperature": 0.5,
        "unheard_of": 1,
    }
    plain = await renderer.of_chat({"messages": [USER]})
    assert (await renderer.of_chat({"messages": [USER], **nothing})).tolist() == plain.tolist()


async def test_arguments_nested_too_deep_are_left_to_the_engine(renderer):
    deep = CALL | {"function": {"name": "now", "arguments": "[" * 200_000}}
    with pytest.raises(Unrenderable):
        await renderer.of_chat({"messages": [USER, {"role": "assistant", "tool_calls": [deep]}]})


async def test_a_template_that_refuses_a_chat_leaves_it_to_the_engine(tmp_path):
    source = model(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(Unrenderable, match="roles must alternate") as refused:
        await load(source).of_chat({"messages": [USER]})
    assert refused.value.reason == "refused"


async def test_a_template_cannot_reach_what_is_outside_it(tmp_path):
    source = model(tmp_path, "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(Unrenderable, match="SecurityError"):
        await load(source).of_chat({"messages": [USER]})


async def test_a_prompt_that_grows_too_long_or_takes_too_long_is_given_up(tmp_path, monkeypatch):
    endless = (
        "{% for a in messages %}{% for b in messages %}{{ a.content }}{% endfor %}{% endfor %}"
    )
    renderer = load(model(tmp_path, endless))
    body = {"messages": [USER] * 1_000}
    monkeypatch.setattr(templates_module, "MAX_CHARACTERS", 10_000)
    with pytest.raises(Unrenderable, match="10000 characters"):
        await renderer.of_chat(body)
    monkeypatch.setattr(templates_module, "MAX_CHARACTERS", 1 << 30)
    monkeypatch.setattr(renderer_module, "PROMPT_S", 0.0)
    with pytest.raises(Unrenderable, match="takes over 0 s"):
        await renderer.of_chat(body)
    monkeypatch.setattr(messages_module, "MAX_MESSAGES", 999)
    with pytest.raises(Unrenderable, match="1000 messages"):
        await renderer.of_chat(body)


async def test_more_text_than_may_wait_is_refused(tmp_path):
    pool = TokenizerThreads(max_waiting=0, max_size=0)
    renderer = load(model(tmp_path), pool=pool)
    assert len(await renderer.of_text("short"))
    body = {"messages": [USER | {"content": "long " * 1_000}]}
    assert len(await renderer.of_chat(body))
    is_over = threading.Event()
    other = asyncio.create_task(pool.run(1, is_over.wait))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await renderer.of_chat(body)
    is_over.set()
    await other
    assert len(await renderer.of_chat(body))


async def test_the_date_can_be_written_into_a_prompt(tmp_path):
    source = model(tmp_path, "{{ strftime_now('on the %%') }}")
    assert text_of(source, await load(source).of_chat({"messages": [USER]})) == "on the %"


async def test_templates_for_tools_are_used_with_tools(tmp_path):
    source = model(tmp_path, [{"name": "default", "template": "plain"}])
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("{{ tools | tojson }}")
    renderer = load(source)
    assert text_of(source, await renderer.of_chat({"messages": [USER]})) == "plain"
    with_tools = await renderer.of_chat({"messages": [USER], "tools": [TOOL]})
    assert '"name": "now"' in text_of(source, with_tools)


@pytest.mark.parametrize(
    ("template", "config", "files"),
    [
        (None, {}, {}),
        (models.CHATML, {}, {"config.json": {"architectures": ["GptOssForCausalLM"]}}),
        (models.CHATML, {}, {"chat_template.json": {"chat_template": "another"}}),
        ("{{ bos_token }}", {"tokenizer_class": "LlamaTokenizer"}, {}),
    ],
    ids=["none", "in_code", "processor", "class"],
)
async def test_without_a_template_that_is_surely_the_engines_only_text_is_tokenized(
    tmp_path, template, config, files
):
    source = model(tmp_path, template, **config)
    for name, content in files.items():
        (tmp_path / name).write_bytes(orjson.dumps(content))
    renderer = load(source)
    with pytest.raises(Unrenderable) as refused:
        await renderer.of_chat({"messages": [USER]})
    assert refused.value.reason == "template"
    assert len(await renderer.of_text("Hello"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("chat_template.jinja", "{% if %}"),
        ("chat_template.jinja", b"\xff"),
        ("tekken.json", "{}"),
    ],
)
def test_files_that_cannot_be_read_make_a_tokenizer_unavailable(tmp_path, name, content):
    source = model(tmp_path)
    raw = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(TokenizerUnavailable):
        load(source)


@pytest.mark.parametrize("source", ["", "nobody/has-this", "../..", "/nowhere", "a/b/c", "\0"])
def test_a_source_that_is_nowhere_on_this_machine_is_unavailable(source):
    with pytest.raises(TokenizerUnavailable):
        load(source)


def test_a_model_is_found_by_name_in_the_local_cache(tmp_path):
    revision = "0" * 40
    cached = tmp_path / "hub/models--org--qwen"
    shutil.copytree(DATA / "qwen", cached / "snapshots" / revision)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(revision)
    done = subprocess.run(
        [sys.executable, "-c", "from app.tokens import load; print(load('org/qwen').fingerprint)"],
        env={**os.environ, "HF_HOME": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == load(str(DATA / "qwen")).fingerprint, done.stderr


LONG = "x" * 6_000_000


def called(**members):
    function = CALL["function"] | members.pop("function", {})
    return {"role": "assistant", "tool_calls": [CALL | {"function": function} | members]}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER | {"content": LONG}]},
        {"messages": [USER | {"content": [{"type": "text", "text": LONG}]}]},
        {"messages": [USER, called(id=LONG)]},
        {"messages": [USER, called(function={"name": LONG})]},
        {"messages": [USER, called(function={"arguments": orjson.dumps({LONG: 1}).decode()})]},
        {"messages": [USER, called(function={"more": LONG})]},
        {"messages": [USER, called(more={LONG: 1})]},
        {"messages": [USER | {"name": LONG}]},
        {"messages": [USER, {"role": "assistant", "reasoning": LONG}]},
        {"messages": [USER, {"role": "tool", "content": "", "tool_call_id": LONG}]},
        {"messages": [USER], "chat_template_kwargs": {"documents_of_mine": [LONG]}},
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": LONG}}]},
        {"messages": [USER | {"content": [[["deep"] * 9] * 9] * 99}]},
        {"messages": [USER] * 60},
    ],
    ids=lambda body: str(body).replace(LONG, "LONG")[:80],
)
async def test_nothing_large_is_rendered_where_requests_are_answered(renderer, monkeypatch, body):
    here = threading.get_ident()
    seen = []

    def note(*_, **__):
        seen.append(threading.get_ident())
        raise Unrenderable("size", "seen")

    monkeypatch.setattr(renderer_module, "rendered", note)
    with pytest.raises(Unrenderable, match="seen"):
        await renderer.of_chat(body)
    assert seen
    assert here not in seen
    seen.clear()
    with pytest.raises(Unrenderable, match="seen"):
        await renderer.of_chat({"messages": [USER]})
    assert seen == [here]


SILENT = 8 * "{% for m in messages %}" + 8 * "{% endfor %}"
RECURSIVE = (
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(messages|length) }}"
)
WITHIN_ITSELF = (
    "{% for x in messages recursive %}{% if loop.depth < 9 %}{{ loop(messages) }}{% endif %}"
    "{% endfor %}"
)
LOOPING = "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}"


@pytest.mark.parametrize("template", [SILENT, RECURSIVE, WITHIN_ITSELF])
async def test_a_template_that_writes_nothing_is_stopped_all_the_same(
    tmp_path, monkeypatch, template
):
    monkeypatch.setattr(renderer_module, "PROMPT_S", 0.05)
    renderer = load(model(tmp_path, template))
    with pytest.raises(Unrenderable, match=r"takes over 0\.05 s") as refused:
        await renderer.of_chat({"messages": [USER] * 60})
    assert refused.value.reason == "size"


async def test_a_template_that_calls_itself_for_ever_is_refused(tmp_path):
    with pytest.raises(Unrenderable, match="RecursionError"):
        await load(model(tmp_path, LOOPING)).of_chat({"messages": [USER]})


async def test_what_nobody_waits_for_is_rendered_no_further(tmp_path):
    pool = TokenizerThreads(num_threads=1)
    renderer = load(model(tmp_path, SILENT), pool=pool)
    asking = asyncio.create_task(renderer.of_chat({"messages": [USER] * 60}))
    await asyncio.sleep(0.1)
    asking.cancel()
    # The only thread is free again.
    assert await pool.run(1, int) == 0
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_short_body_that_takes_long_is_rendered_in_a_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(renderer_module, "AT_ONCE_S", -1.0)
    renderer = load(model(tmp_path))
    threads = set()
    chat = renderer._chat

    def seen(*args):
        threads.add(threading.get_ident())
        return chat(*args)

    monkeypatch.setattr(renderer, "_chat", seen)
    assert len(await renderer.of_chat({"messages": [USER]}))
    assert len(threads) == 2


async def test_loops_know_their_length_and_neighbours_as_ever(tmp_path):
    template = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.revindex }}"
        "{{ loop.last }}{{ loop.nextitem is defined }}{{ loop.previtem is defined }}"
        "{% else %}none{% endfor %}{% for k, v in {'a': 1}.items() if v %}{{ k }}{% endfor %}"
        "{% for x in nothing %}{% else %}empty{% endfor %}"
    )
    chat = ChatTemplate(template, {})
    said = chat.render([USER, USER], None, add_generation_prompt=True, continue_final_message=False)
    assert said == "1/22FalseTrueFalse2/21TrueFalseTrueaempty"
