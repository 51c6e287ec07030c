"""Writes a recording anew, in the encoding of an older vLLM:

    python tests/engines/record_arrays.py KV_EVENTS FILE NEW_FILE

KV_EVENTS: vllm/distributed/kv_events.py of the older version, as its wheel has it. Run by a Python
that has a vLLM, from which that file imports the rest.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import msgspec

source, file, new_file = sys.argv[1:]
spec = spec_from_file_location("older_kv_events", source)
assert spec is not None
assert spec.loader is not None
older = module_from_spec(spec)
sys.modules[spec.name] = older
spec.loader.exec_module(older)
encode = msgspec.msgpack.Encoder().encode


def as_older(payload):
    ts, events, rank = msgspec.msgpack.decode(payload)
    made = [_event(event) for event in events]
    return encode(older.KVEventBatch(ts=ts, events=made, data_parallel_rank=rank))


def _event(event):
    kind = getattr(older, event["type"])
    return kind(**{name: event.get(name) for name in kind.__struct_fields__})


steps = msgspec.msgpack.decode(Path(file).read_bytes())
for step in steps:
    step["payloads"] = [as_older(payload) for payload in step["payloads"]]
Path(new_file).write_bytes(encode(steps))
