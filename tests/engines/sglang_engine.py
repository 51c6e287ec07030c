"""sglang_engine.py HTTP_PORT EVENTS_PORT REPLAY_PORT PAGE_SIZE PAGES

SGLang's own radix cache and event publisher, behind the little of its HTTP interface that an agent
reads. Run by a Python that has SGLang; nothing of kvroute is loaded.

POST /ask {"tokens": [...], "salt": "..."} does to the cache what a request does,
and answers how many tokens were cached. POST /reset drops all.
"""

import importlib.machinery
import json
import sys
from array import array
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from unittest.mock import MagicMock

# SGLang imports it, and nothing here uses it; its builds need CUDA.
for name in ("", ".transforms", ".io", ".transforms.v2", ".transforms.functional"):
    for full in (f"torchvision{name}", f"torchvision{name}.functional"):
        module = MagicMock(name=full)
        module.__spec__ = importlib.machinery.ModuleSpec(full, None)
        module.__version__, module.__path__ = "0.28.0", []
        sys.modules[full] = module

import torch
from sglang.srt.disaggregation.kv_events import KVEventBatch, ZmqEventPublisher
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.version import __version__

HTTP_PORT, EVENTS_PORT, REPLAY_PORT, PAGE, PAGES = map(int, sys.argv[1:])


class Allocator:
    device = "cpu"

    def free(self, _): ...

    def free_segment(self, _, start_pos=0): ...


cache = RadixCache.create_simulated(
    page_size=PAGE, enable_kv_cache_events=True, mock_allocator=Allocator()
)
publisher = ZmqEventPublisher(
    0, endpoint=f"tcp://*:{EVENTS_PORT}", replay_endpoint=f"tcp://*:{REPLAY_PORT}"
)
stamp = 0.0
one_at_a_time = Lock()


def publish():
    global stamp
    events = cache.take_events()
    if events:
        stamp += 1.0
        publisher.publish(KVEventBatch(ts=stamp, events=events))


def ask(tokens, salt):
    # The last token is always computed.
    asked = RadixKey(array("q", tokens[:-1]), cache_salt=salt)
    cached = cache.match_prefix(MatchPrefixParams(key=asked)).device_prefix_len
    needed = len(tokens) // PAGE * PAGE - cached
    room = PAGES * PAGE - cache.total_size()
    if needed > room:
        cache.evict(EvictParams(num_tokens=needed - room))
    whole = RadixKey(array("q", tokens), cache_salt=salt)
    cache.insert(InsertParams(key=whole, value=torch.arange(len(tokens))))
    publish()
    return cached


ANSWERS = {
    "/ready": {},
    "/v1/models": {"data": [{"id": "llama", "root": "llama", "max_model_len": 8192}]},
    "/v1/loads": {
        "loads": [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0}]
    },
    "/server_info": {
        "version": __version__,
        "page_size": PAGE,
        "max_total_num_tokens": PAGE * PAGES,
        "kv_events": {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": EVENTS_PORT,
            "replay_endpoint_port_base": REPLAY_PORT,
            "block_size": PAGE,
            "dp_size": 1,
        },
    },
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer(ANSWERS.get(self.path.partition("?")[0]))

    def do_POST(self):
        length = int(self.headers.get("content-length") or 0)
        asked = json.loads(self.rfile.read(length) or b"{}")
        if self.path == "/reset":
            with one_at_a_time:
                cache.reset()
                publish()
            self._answer({})
        elif self.path == "/ask":
            with one_at_a_time:
                cached = ask(asked["tokens"], asked.get("salt"))
            self._answer({"cached": cached})
        else:
            self._answer(None)

    def _answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(404 if content is None else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_): ...


publish()
sys.stdout.write("serving\n")
sys.stdout.flush()
ThreadingHTTPServer(("127.0.0.1", HTTP_PORT), Handler).serve_forever()
