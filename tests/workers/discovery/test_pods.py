"""What a pod says of the engine in it."""

import pytest

from app.core.errors import ConfigError
from app.core.settings.agent import EngineAgentSettings
from tests.workers.discovery.api_server import pod
from workers.discovery.kubernetes import engine_of

PROCESS = EngineAgentSettings()


def engine(**changes):
    found = engine_of(pod("a", "http://10.0.0.1:8000", **changes), PROCESS)
    assert found is not None
    return found


def test_a_pod_is_a_worker_of_its_name_at_its_address():
    told = engine()
    assert told.settings.worker_id == "a"
    assert told.settings.engine_url == "http://10.0.0.1:8000"
    assert (told.ready, told.leaving) == (True, False)


@pytest.mark.parametrize("changes", [{"ip": None}, {"phase": "Failed"}, {"phase": "Succeeded"}])
def test_a_pod_that_is_evicted_or_has_no_address_has_no_engine(changes):
    assert engine_of(pod("a", "http://10.0.0.1:8000", **changes), PROCESS) is None


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
    found = engine_of(pod("a", "http://10.0.0.1:8000", labels=labels), PROCESS)
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
