"""Engines in the pods of Kubernetes that a selector matches: listed, then watched.

Whatever ends a watch, all is listed again, so that nothing is missed, removals included. The server
ends it after WATCH_S, and a connection that is dead ends a little later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from kubernetes_asyncio import client
from kubernetes_asyncio.client.exceptions import ApiException

from app.core.errors import ConfigError, KvrouteError, shown
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import base_url
from workers.discovery.engine import DiscoveredEngine, Members, Tell, port_of, settings_of
from workers.tasks import until_it_works

log = logging.getLogger(__name__)

LIST_S = 30.0
WATCH_S = 60
DEAD_S = 10.0
WAIT_S, WAIT_MAX_S = 0.5, 30.0
"""Pauses before pods are listed again, after a failure or a watch that told nothing."""
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class WatchFailed(KvrouteError):
    """The API server does not list, or ended a watch that had told nothing."""


def namespaces_of(process: EngineAgentSettings) -> tuple[str, ...]:
    """Returns those that are set, or that of the pod in which the agent runs."""
    if names := tuple(filter(None, map(str.strip, process.kubernetes_namespace.split(",")))):
        return names
    with suppress(OSError):
        return (OWN_NAMESPACE.read_text().strip(),)
    return ("default",)


class Pods:
    """A source of engines, each known by the UID of its pod."""

    def __init__(self, process: EngineAgentSettings, configuration: client.Configuration) -> None:
        self._configuration = configuration
        names = namespaces_of(process)
        self._namespaces = [NamespacePods(process, name, len(names) > 1) for name in names]

    async def follow(self, tell: Tell) -> None:
        def tell_all() -> None:
            members = Members()
            for each in self._namespaces:
                members.engines |= each.members.engines
                members.wrong |= each.members.wrong
            tell(members)

        async with client.ApiClient(self._configuration) as api, asyncio.TaskGroup() as tasks:
            core = client.CoreV1Api(api)
            for each in self._namespaces:
                tasks.create_task(each.follow(core, tell_all))


class NamespacePods:
    """Pods of one namespace. is_one_of_several: workers are named by it, too, and the others are
    told of while it cannot be listed."""

    def __init__(self, process: EngineAgentSettings, name: str, is_one_of_several: bool) -> None:
        self._process, self._name, self._is_one_of_several = process, name, is_one_of_several
        self._prefix = f"{name}." if is_one_of_several else ""
        self.members = Members()

    async def follow(self, core: client.CoreV1Api, tell: Callable[[], None]) -> None:
        """Calls `tell` whenever `members` has been read."""
        while True:
            await until_it_works(
                partial(self._listed_and_watched, core, tell),
                WatchFailed,
                f"pods {self._process.kubernetes_selector} of {self._name}",
                WAIT_S,
                WAIT_MAX_S,
            )
            # A watch may end again and again after it has told something.
            await asyncio.sleep(WAIT_S)

    async def _listed_and_watched(self, core: client.CoreV1Api, tell: Callable[[], None]) -> None:
        """Returns once the watch ends that begins with what is listed. Raises WatchFailed if it
        told nothing, and did not last."""
        try:
            version = await self._list(core)
        except WatchFailed as error:
            if self._is_one_of_several:
                self.members.wrong[self._name] = f"namespace {self._name}: {error}"
            raise
        tell()
        clock = asyncio.get_running_loop().time
        begun_s, num_told, why = clock(), 0, "its end"
        try:
            async with self._asked(core, WATCH_S + DEAD_S, version) as answer:
                async for line in answer.content:
                    self._take(line)
                    tell()
                    num_told += 1
        except WatchFailed as error:
            why = str(error)
        if not num_told and clock() - begun_s < WATCH_S / 2:
            raise WatchFailed(f"the watch told nothing: {why}")
        log.debug("pods are listed again, as a watch ended: %s", why)

    async def _list(self, core: client.CoreV1Api) -> str:
        """Returns the version of what there is now. Raises WatchFailed."""
        async with self._asked(core, LIST_S) as answer:
            listed = _json(await answer.read())
        pods = {uid_of(pod): partial(self._read, pod) for pod in listed["items"]}
        self.members.read_all(pods)
        version: str = listed["metadata"]["resourceVersion"]
        return version

    def _read(self, pod: dict[str, Any]) -> DiscoveredEngine | None:
        return engine_of(pod, self._process, self._prefix)

    def _take(self, line: bytes) -> None:
        """Takes in an event of the watch. Raises WatchFailed."""
        event = _json(line)
        kind, about = event["type"], event["object"]
        if kind == "ERROR":
            raise WatchFailed(f"{about.get('code')} {about.get('message') or about.get('reason')}")
        if kind != "BOOKMARK":
            engines, uid = self.members.engines, uid_of(about)
            before = engines.pop(uid, None)
            if kind != "DELETED":
                self.members.read(uid, partial(self._read, about), before)
            if before is not None and (kind == "DELETED" or has_ended(about)):
                # Until pods are listed again.
                engines[uid] = replace(before, leaving=True, ended=True)

    @asynccontextmanager
    async def _asked(
        self, core: client.CoreV1Api, deadline_s: float, version: str | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """version: watch from there. Raises WatchFailed, also for what is read of the answer."""
        watch: dict[str, Any] = {
            "watch": True,
            "resource_version": version,
            "allow_watch_bookmarks": True,
            "timeout_seconds": WATCH_S,
        }
        try:
            async with asyncio.timeout(deadline_s):
                answer: Any = await core.list_namespaced_pod(
                    self._name,
                    label_selector=self._process.kubernetes_selector,
                    _preload_content=False,
                    **(watch if version is not None else {}),
                )
                async with answer:
                    if answer.status != 200:
                        raise WatchFailed(f"{answer.status} {answer.reason}")
                    yield answer
        except TimeoutError:
            raise WatchFailed(f"nothing came for {deadline_s:g} s") from None
        except (ApiException, aiohttp.ClientError, OSError, ValueError) as error:
            raise WatchFailed(str(error) or type(error).__name__) from None
        except (KeyError, TypeError, AttributeError) as error:
            raise WatchFailed(f"the answer is none of Kubernetes' API: {error!r}") from None


def _json(text: bytes) -> dict[str, Any]:
    try:
        told = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise WatchFailed(f"the answer is no JSON: {error}") from None
    if not isinstance(told, dict):
        raise WatchFailed("the answer is no JSON object")
    return told


ANNOTATION = "kvroute.io/"
"""Beginning of an annotation that is a flag of the agent, of this pod alone; or its port."""
REVISION = f"{ANNOTATION}revision"
"""Annotation that is also a label, by which pods can be selected, too."""
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
NODE_TYPE = "ray.io/node-type"
"""Labels by which LeaderWorkerSet (KServe has it, too) and KubeRay tell one engine's pods apart."""


def uid_of(pod: Any) -> str:
    """Returns the UID of a pod as the API has it; "": it has none."""
    try:
        return str(pod["metadata"]["uid"])
    except (LookupError, TypeError):
        return ""


def has_ended(pod: Mapping[str, Any]) -> bool:
    status = pod.get("status")
    return isinstance(status, dict) and status.get("phase") in ("Succeeded", "Failed")


def is_leader(labels: Mapping[str, str]) -> bool:
    """Whether a pod with these labels listens for an engine, which may span several pods."""
    return labels.get(WORKER_INDEX, "0") == "0" and labels.get(NODE_TYPE, "head") == "head"


def engine_of(
    pod: Mapping[str, Any], process: EngineAgentSettings, prefix: str = ""
) -> DiscoveredEngine | None:
    """Returns the engine of a pod as the API has it; None: it has no address yet, has ended, or
    only computes for the pod that leads. prefix: of the worker's name. Raises ConfigError, and
    others if it is no pod."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels = metadata.get("labels") or {}
    address = status.get("podIP")
    if not address or has_ended(pod) or not is_leader(labels):
        return None
    name, _ = prefix + metadata["name"], metadata["uid"]
    told = {
        key.removeprefix(ANNOTATION): value
        for key, value in (metadata.get("annotations") or {}).items()
        if key.startswith(ANNOTATION)
    }
    told.setdefault("revision", labels.get(REVISION, process.revision))
    port_text = told.pop("port", "") or process.port_name
    port = port_of(port_text) or _port_named(port_text, pod)
    if port is None:
        raise ConfigError(
            f"{name}: has no port {shown(port_text)}: set {ANNOTATION}port to a number from 1 to "
            "65535, or to a port's name"
        )
    return DiscoveredEngine(
        settings_of(process, name, base_url(address, port), told),
        ready=any(
            condition.get("type") == "Ready" and condition.get("status") == "True"
            for condition in status.get("conditions") or ()
        ),
        leaving=metadata.get("deletionTimestamp") is not None,
    )


def _port_named(name: str, pod: Mapping[str, Any]) -> int | None:
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or ():
            if port.get("name") == name:
                return int(port["containerPort"])
    return None
