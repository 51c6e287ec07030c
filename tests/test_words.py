"""The words of docs/design/words.md, and the names of files by which strangers find concepts."""

import re

import pytest

from tests.test_docs import ROOT, anchor_of, prose

PAGE = ROOT / "docs/design/words.md"
WORDS = re.findall(r"^\| \[([^]]+)\]\(([^)#]+)#([^)]+)\)", PAGE.read_text(), re.MULTILINE)

CONCEPTS = {
    "route": "app/edge/route.py",
    "health: operators": "app/edge/operators.py",
    "config": "app/config_file.py",
    "cost": "app/policy/cost.py",
    "hashing": "app/core/hashing.py",
    "keys": "app/core/keys.py",
    "scripts": "app/state/scripts.py",
    "match": "lua/match.lua",
    "reserve": "lua/reserve.lua",
    "heartbeat: beat": "lua/beat.lua",
    "upstream": "app/door/engine/upstream.py",
    "tokens": "app/tokens/encoder.py",
    "templates": "app/tokens/templates.py",
    "auth: keys": "app/http/keys.py",
    "waiting": "app/router/waiting.py",
    "tiers": "workers/engines/torch/tiers.py",
    "planner's process: main": "app/planner/main.py",
    "Kubernetes connector": "app/planner/connectors/kubernetes.py",
    "virtual time": "loadtest/virtual.py",
    "doctor": "app/ops/doctor.py",
    "cli": "app/cli.py",
    "Sentinel": "app/state/sentinel.py",
    "LoRA names: adapter": "workers/bridge/events/adapter_folders.py",
    "tracing": "app/door/told/tracing.py",
    "simulated engine": "workers/engines/sim/runner.py",
    "load test": "loadtest/replay.py",
    "session affinity": "app/policy/affinity.py",
    "app factory": "app/edge/app.py",
    "router metrics": "app/router/metrics.py",
    "chat endpoint: openai": "app/edge/openai.py",
    "answer's stream": "app/door/answer/stream.py",
    "retry of a request: tries": "app/door/tries.py",
    "planner": "app/planner/loop.py",
    "forecast: replay": "app/planner/rules/replay.py",
    "vLLM's events": "workers/bridge/events/vllm.py",
    "agent beside an engine": "workers/engine_agent.py",
    "event publisher": "workers/agent/publish.py",
    "release": "lua/release.lua",
    "degraded mode": "app/router/degraded.py",
    "the door's metrics": "app/door/told/metrics.py",
    "console's data": "app/console/console.py",
    "reuse": "app/policy/reuse.py",
    "trust": "app/core/trust.py",
    "price of transfers": "app/policy/transfer.py",
    "NIXL's protocol": "app/door/transfer/nixl.py",
    "SGLang's bootstrap": "app/door/transfer/sglang.py",
    "roles": "app/core/roles.py",
    "KV lease": "app/policy/kv_lease.py",
    "sleeping model: policies": "app/planner/rules/policies.py",
    "hot prefix": "loadtest/experiments/hot_prefix.py",
    "cells": "loadtest/experiments/cells.py",
    "load columns": "app/state/columns.py",
    "carried reports": "app/router/carried.py",
    "transfer over TCP": "workers/kv/transfer/tcp.py",
    "doctor's transfer check: worker check": "app/ops/worker_checks.py",
}
"""Concepts that strangers were asked to find. Behind a colon: the name that they have to know.
Nothing limits how often a client asks, so no file is named after that."""


def says(path, phrase):
    """Whether the file or its package is named after a word of the phrase, in whatever form."""
    words = re.findall(r"[a-z]{3,}", phrase.replace("'s", "").lower()) or [phrase.lower()]
    roots = [word[: max(3, min(4, len(word) - 1))] for word in words]
    parts = re.split(r"[/_.]", path.lower())
    return any(part.startswith(root) or root in part for part in parts for root in roots)


def section(document, anchor):
    """A heading with its text, up to the next one."""
    parts = re.split(r"^#+ ", prose(document), flags=re.MULTILINE)
    [found] = [part for part in parts if anchor_of(part.partition("\n")[0]) == anchor]
    return found


@pytest.mark.parametrize(("word", "page", "anchor"), WORDS)
def test_the_section_of_a_word_tells_of_it(word, page, anchor):
    assert word.lower() in section(PAGE.parent / page, anchor).lower()


def test_every_word_has_a_section():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert len(WORDS) == len(rows) - 1
    assert len(WORDS) > 40


pytest.mark.parametrize("concept", CONCEPTS)


@pytest.mark.parametrize("concept", CONCEPTS)
def test_a_concept_is_in_a_file_of_its_name(concept):
    path, (what, _, named) = CONCEPTS[concept], concept.partition(": ")
    assert (ROOT / path).exists()
    assert says(path, named or what)


def test_a_file_of_another_name_is_told_from_one_of_the_words():
    assert says("app/state/reservations.py", "reserve")
    assert not says("app/core/types.py", "worker key")
    assert not says("app/router/vouching.py", "away")
