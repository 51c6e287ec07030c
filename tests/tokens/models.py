"""Small models to render for: tokenizers of the kinds that there are, and families of templates.

    python -m tests.tokens.models FOLDER

writes those of FAMILIES, each to a folder of its own below FOLDER.
"""

import json
import sys
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = (Path(__file__).parents[2] / "LICENSE").read_text().splitlines()[:120]
WORDS = r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_level(*special, add_prefix_space=False):
    """As GPT-2 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, special)


def split_bytes(*special):
    """As Llama 3: words by a regular expression, a begin of text added."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _trained(tokenizer, special)
    tokenizer.post_processor = _with_start(tokenizer, special[0])
    return tokenizer


def metaspace(*special, prepend_scheme="first"):
    """As Mistral and Llama 2: a mark for spaces; where `prepend_scheme` says, one before a text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *special], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = _with_start(tokenizer, special[0])
    return tokenizer


def normalizing(*special):
    """Lower case, compatible forms, white space stripped, and a space before each text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Lowercase(),
            normalizers.Strip(left=False, right=True),
            normalizers.Prepend("▁"),
            normalizers.Replace(" ", "▁"),
        ]
    )
    return _trained(tokenizer, ("<unk>", *special))


def _trained(tokenizer, special):
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _with_start(tokenizer, start):
    start_id = tokenizer.token_to_id(start)
    return processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, start_id)]
    )


def save(folder, tokenizer, template=None, **config):
    """A folder with a tokenizer, and its config unless that would be empty."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    if template is not None:
        config["chat_template"] = template
    if config:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder


CHATML = """\
{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

LLAMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\nTools:\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- if reasoning_effort is defined %}
    {{- "Reasoning: " + reasoning_effort + "\\n" }}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = message.reasoning_content or '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and reasoning_content %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + (tool_call | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

PARTS = """\
{{ bos_token }}{% for message in messages %}
{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}
{%- endif %}
{%- if message.role == 'assistant' %}{{ ' ' }}{% else %}{{ '[INST] ' }}{% endif %}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{{ part.text }}{{ '|' }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '[TOOL_CALLS]' + (call | tojson) }}{% endfor %}
{%- if message.role == 'assistant' %}{{ eos_token }}{% else %}{{ ' [/INST]' }}{% endif %}
{%- endfor %}
"""

FAMILIES = ("chatml", "llama", "qwen", "parts")


def write(folder):
    """The FAMILIES, below `folder`."""
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    chatml = byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    save(folder / "chatml", chatml, CHATML, **ends)
    names = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id")
    llama = split_bytes(*(f"<|{name}|>" for name in names))
    llama_ends = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": {"__type": "AddedToken", "content": "<|eot_id|>"},
    }
    save(folder / "llama", llama, **llama_ends)
    (folder / "llama" / "chat_template.jinja").write_text(LLAMA)
    qwen = byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    qwen.normalizer = normalizers.NFC()
    qwen.add_tokens([AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    late = {"content": "<think>", "normalized": False, "special": False}
    late |= {"lstrip": False, "rstrip": False, "single_word": False}
    listed = {str(qwen.get_vocab_size()): late}
    save(folder / "qwen", qwen, **ends, bos_token=None, added_tokens_decoder=listed)
    (folder / "qwen" / "chat_template.jinja").write_text(QWEN)
    parts = metaspace("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]")
    named = [
        {"name": "default", "template": PARTS},
        {"name": "tool_use", "template": "{% if tools %}{{ tools | tojson }}{% endif %}" + PARTS},
    ]
    save(folder / "parts", parts, named, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
