"""Engines in pods, as an API server tells of them that fails in the ways that they do."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from app.core.errors import ConfigError
from tests.eventually import eventually
from tests.workers.discovery.api_server import CLOSE, CUT, NAMESPACE, api_server, pod
from tests.workers.discovery.fleets import engines, running, settings, until_live
from workers.discovery import kubernetes
from workers.discovery.engine import ANSWERS
from workers.discovery.kubernetes import Pods, engine_of

PROCESS = settings(kubernetes_selector="app=vllm", kubernetes_namespace=NAMESPACE)
URL = "http://10.0.0.1:8000"


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(kubernetes, "WAIT_S", 0.01)
    monkeypatch.setattr(kubernetes, "WAIT_MAX_S", 0.05)


class Watched:
    """What is known of the pods of a server."""

    def __init__(self, server, pods):
        self.server, self.pods = server, pods
        self.engines = {}
        self.wrong = {}

    def tell(self, members):
        self.engines, self.wrong = dict(members.engines), dict(members.wrong)

    async def until(self, *uids):
        await eventually(self._uids, lambda seen: seen == sorted(uids))

    async def _uids(self):
        return sorted(uid for uid, engine in self.engines.items() if not engine.ended)

    async def until_watched(self, times=1):
        await eventually(self._watches, lambda seen: seen >= times)

    async def num_open(self):
        return self.server.num_open

    async def _watches(self):
        return len(self.server.watches)


@asynccontextmanager
async def watched(*names, namespaces=NAMESPACE):
    async with api_server() as (server, configuration):
        for name in names:
            server.put(pod(name, URL))
        process = replace(PROCESS, kubernetes_namespace=namespaces)
        seen = Watched(server, Pods(process, configuration))
        task = asyncio.create_task(seen.pods.follow(seen.tell))
        try:
            await eventually(seen.num_open, lambda number: number == namespaces.count(",") + 1)
            yield seen
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_pods_are_listed_and_then_watched_from_there():
    async with watched("a") as seen:
        await seen.until("uid-a")
        assert seen.server.lists == [{"labelSelector": "app=vllm"}]
        [query] = seen.server.watches
        assert query["resourceVersion"] == "2"
        assert query["allowWatchBookmarks"] == "True"
        assert query["labelSelector"] == "app=vllm"
        seen.server.put(pod("b", URL))
        seen.server.bookmark()
        await seen.until("uid-a", "uid-b")
        seen.server.put(pod("b", URL, ip=None))
        await seen.until("uid-a")
        seen.server.delete("uid-a")
        await seen.until()
        assert len(seen.server.lists) == 1


@pytest.mark.parametrize("how", [CLOSE, CUT], ids=["ended", "cut"])
async def test_what_changed_after_a_watch_ended_is_listed_and_removals_too(how):
    async with watched("a", "b") as seen:
        await seen.until("uid-a", "uid-b")
        seen.server.is_silent = True
        seen.server.delete("uid-a")
        seen.server.put(pod("c", URL))
        seen.server.is_silent = False
        seen.server.end_watches(how)
        await seen.until("uid-b", "uid-c")


async def test_a_version_that_is_too_old_is_listed_anew_and_not_in_haste(monkeypatch):
    async with watched("a") as seen:
        seen.server.is_gone = True
        seen.server.end_watches()
        await seen.until_watched(4)
        seen.server.put(pod("b", URL))
        await seen.until("uid-a", "uid-b")
        monkeypatch.setattr(kubernetes, "WAIT_S", 60.0)
        seen.server.is_gone = False
        number = len(seen.server.watches)
        await seen.until_watched(number + 1)
        seen.server.put(pod("c", URL))
        await seen.until("uid-a", "uid-b", "uid-c")


async def test_a_watch_that_ends_once_it_has_told_something_is_not_begun_again_in_haste(
    monkeypatch,
):
    monkeypatch.setattr(kubernetes, "WAIT_S", 60.0)
    async with watched("a") as seen:
        await eventually(lambda: asyncio.sleep(0, seen.server.num_open))
        seen.server.put(pod("b", URL))
        await seen.until("uid-a", "uid-b")
        seen.server.end_watches()
        await asyncio.sleep(0.5)
        assert len(seen.server.lists) == 1


@pytest.mark.parametrize("status", [401, 403, 410, 500, 504])
async def test_while_the_server_fails_all_stays_as_it_was(status):
    async with watched("a") as seen:
        await seen.until("uid-a")
        seen.server.list_status = seen.server.watch_status = status
        seen.server.end_watches()
        await eventually(lambda: asyncio.sleep(0, len(seen.server.lists)), lambda n: n > 4)
        await seen.until("uid-a")
        seen.server.list_status = 200
        seen.server.put(pod("b", URL))
        await seen.until("uid-a", "uid-b")
        number = len(seen.server.watches)
        seen.server.watch_status = 200
        await seen.until_watched(number + 1)


async def test_a_watch_that_says_nothing_ends(monkeypatch):
    monkeypatch.setattr(kubernetes, "WATCH_S", 0)
    monkeypatch.setattr(kubernetes, "DEAD_S", 0.2)
    async with watched("a") as seen:
        await seen.until("uid-a")
        seen.server.is_silent = True
        seen.server.put(pod("b", URL))
        await seen.until("uid-a", "uid-b")


def odd(**changes):
    """A pod of the name a, with these parts of it replaced."""
    return pod("a", URL) | changes


ODD = {
    "role": pod("a", URL, annotations={"role": "x"}),
    "profile": pod("a", URL, annotations={"profile": "h100"}),
    "unknown": pod("a", URL, annotations={"engine": "x"}),
    "digit of Unicode": pod("a", URL, annotations={"port": "\u00b2"}),
    "5,000 digits": pod("a", URL, annotations={"port": "9" * 5000}),
    "negative": pod("a", URL, annotations={"port": "-1"}),
    "no whole number": pod("a", URL, annotations={"port": "8000.0"}),
    "annotations of another type": odd(metadata={"uid": "uid-a", "name": "a", "annotations": [1]}),
    "a port of text": odd(
        spec={"containers": [{"ports": [{"name": "http", "containerPort": "x"}]}]}
    ),
    "no spec": odd(spec=None),
    "no pod": odd(status="x"),
    "a name with an end of line": odd(metadata={"uid": "uid-a", "name": "a\nb"}),
}


@pytest.mark.parametrize("wrong", ODD.values(), ids=ODD)
async def test_a_pod_that_is_wrong_stays_as_it_was_and_others_come_and_go(wrong, caplog):
    async with watched("a", "b") as seen:
        await seen.until("uid-a", "uid-b")
        before = seen.engines["uid-a"]
        seen.server.put(wrong)
        seen.server.tell_of(None)
        seen.server.put(pod("c", URL))
        seen.server.delete("uid-b")
        await seen.until("uid-a", "uid-c")
        assert len(seen.server.lists) == 1
        seen.server.end_watches()
        await seen.until_watched(2)
        seen.server.put(pod("d", URL))
        await seen.until("uid-a", "uid-c", "uid-d")
        assert seen.engines["uid-a"] == before
        assert seen.wrong.keys() == {"uid-a"}
        assert caplog.text.count(f"left as it was: {seen.wrong['uid-a']}") == 1
        seen.server.put(pod("a", URL, ready=False))
        await eventually(
            lambda: asyncio.sleep(0, seen.engines["uid-a"].ready), lambda ready: not ready
        )
        assert not seen.wrong


async def test_engines_in_pods_become_workers_and_leave_with_them(redis, tmp_path):
    async with engines(3) as (a, b, c), api_server() as (server, configuration):
        server.put(pod("a", a.url))
        server.put(pod("b", b.url, ready=False))
        pods = Pods(PROCESS, configuration)
        async with running(redis, tmp_path, pods.follow) as fleet:
            await until_live(redis, "a")
            server.put(pod("b", b.url))
            await until_live(redis, "a", "b")
            # Busy, and yet there.
            server.put(pod("b", b.url, ready=False))
            server.put(pod("a", a.url, leaving=True))
            await until_live(redis, "b")
            server.delete("uid-a")
            # Another pod has its name, as of a StatefulSet, and one more the address.
            server.put(pod("a", c.url, uid="uid-2"))
            server.put(pod("c", a.url))
            workers = await until_live(redis, "a", "b", "c")
            assert (workers["a"].address, workers["c"].address) == (c.url, a.url)
            assert fleet.followers.keys() == {"uid-b", "uid-2", "uid-c"}


async def test_a_server_that_was_just_started_and_knows_of_no_pod_ends_no_engine(redis, tmp_path):
    async with engines(1) as (a,), api_server() as (server, configuration):
        server.put(pod("a", a.url))
        pods = Pods(PROCESS, configuration)
        async with running(redis, tmp_path, pods.follow) as fleet:
            await until_live(redis, "a")
            follower = fleet.followers["uid-a"]
            known = dict(server.pods)
            server.pods.clear()

            async def lists():
                server.end_watches()
                return len(server.lists)

            await eventually(lists, lambda number: number > 2 * ANSWERS)
            server.pods |= known
            await until_live(redis, "a")
            assert fleet.followers == {"uid-a": follower}


async def test_pods_of_one_name_in_several_namespaces_are_several_workers():
    async with watched("a", namespaces=f"{NAMESPACE}, other") as seen:
        seen.server.put(pod("a", "http://10.0.0.2:8000", "uid-other", namespace="other"))
        seen.server.put(pod("a", "http://10.0.0.3:8000", "uid-third", namespace="third"))
        await seen.until("uid-a", "uid-other")
        names = {uid: engine.settings.worker_id for uid, engine in seen.engines.items()}
        assert names == {"uid-a": f"{NAMESPACE}.a", "uid-other": "other.a"}


async def test_a_namespace_that_may_not_be_listed_is_told_beside_the_pods_of_others():
    async with watched("a", namespaces=f"{NAMESPACE},other") as seen:
        seen.server.forbidden.add("other")
        seen.server.put(pod("b", "http://10.0.0.2:8000", namespace="other"))
        seen.server.end_watches()
        await eventually(lambda: _wrong(seen), lambda wrong: "other" in wrong)
        seen.server.put(pod("c", "http://10.0.0.3:8000"))
        await seen.until("uid-a", "uid-b", "uid-c")
        assert "namespace other: 403" in seen.wrong["other"]
        seen.server.forbidden.clear()
        await eventually(lambda: _wrong(seen), lambda wrong: not wrong)


async def _wrong(seen):
    return seen.wrong


def engine(**changes):
    found = engine_of(pod("a", URL, **changes), PROCESS)
    assert found is not None
    return found


def test_a_pod_is_a_worker_of_its_name_at_its_address():
    told = engine()
    assert told.settings.worker_id == "a"
    assert told.settings.engine_url == URL
    assert (told.ready, told.leaving) == (True, False)


@pytest.mark.parametrize("changes", [{"ip": None}, {"phase": "Failed"}, {"phase": "Succeeded"}])
def test_a_pod_that_is_evicted_or_has_no_address_has_no_engine(changes):
    assert engine_of(pod("a", URL, **changes), PROCESS) is None


def test_a_pod_says_whether_it_is_ready_and_whether_it_ends():
    assert not engine(ready=False).ready
    assert engine(leaving=True).leaving


def test_annotations_set_what_flags_set():
    told = engine(annotations={"role": "prefill", "kv-transfer": "nixl", "port": "9000"}).settings
    assert (told.role, told.kv_transfer, told.engine_url) == (
        *("prefill", "nixl"),
        "http://10.0.0.1:9000",
    )


def test_the_revision_of_a_pod_is_a_label_or_an_annotation():
    assert engine(revision="7").settings.revision == "7"
    assert engine(revision="7", annotations={"revision": "8"}).settings.revision == "8"
    assert engine().settings.revision == ""


@pytest.mark.parametrize(
    ("labels", "is_engine"),
    [
        ({"leaderworkerset.sigs.k8s.io/worker-index": "0"}, True),
        ({"leaderworkerset.sigs.k8s.io/worker-index": "1"}, False),
        ({"ray.io/node-type": "head"}, True),
        ({"ray.io/node-type": "worker"}, False),
        ({"app": "vllm"}, True),
    ],
)
def test_of_the_pods_of_one_engine_the_one_that_leads_is_it(labels, is_engine):
    found = engine_of(pod("a", URL, labels=labels), PROCESS)
    assert (found is not None) is is_engine


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        ({"role": "x"}, "a: role: needs one of both, prefill, decode, got 'x'"),
        ({"rule": "x"}, "a: rule: needs one of address, "),
        ({"port": "other"}, "a: has no port 'other': set kvroute.io/port to a number from 1 to"),
        ({"port": "0"}, "a: has no port '0'"),
        ({"profile": "h100"}, "a: profile: needs one of 70b-4xh100, 70b-4xh200, 8b-1xh100, got"),
    ],
)
def test_what_is_wrong_in_an_annotation_is_named(annotations, said):
    with pytest.raises(ConfigError, match=said):
        engine(annotations=annotations)
