"""An engine that answers as none should: each request says how by its `user`, and by its text where
it asks for tokens."""

from tests.fakes.faults import HANG_S, RAW, WELL, Faults
from tests.fakes.leased import leased

OTHERS = {"hangs": Faults(tokenize_s=HANG_S), "resets": Faults(how="reset first")}


def hostile_worker(redis, keyspace, name, model):
    """A worker of `model` with such an engine, until the context ends."""
    about = {"models": (model,), "engine": "vllm 0.32.0", "max_model_len": 4096}
    return leased(redis, name, keyspace=keyspace, choose=_as_asked, **about)


def num_asked(engine, how):
    return sum(_how(heard) == how for heard in engine.heard)


def _as_asked(heard):
    how = _how(heard)
    return Faults(raw=how) if how in RAW else OTHERS.get(how, WELL)


def _how(heard):
    how = heard.body.get("prompt" if heard.path == "/tokenize" else "user")
    return how if isinstance(how, str) else ""
