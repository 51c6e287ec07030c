import math
import re
from dataclasses import MISSING, fields

import pytest

from app.core.settings.kinds import check_base_url, parse_engines, parse_weights, variable
from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings

SETTINGS = (RouterSettings, WorkerSettings)


@pytest.mark.parametrize("cls", SETTINGS)
def test_every_field_has_a_default_a_help_text_and_a_variable_of_its_own(cls):
    assert all(f.default is not MISSING and f.metadata["help"] for f in fields(cls))
    variables = [variable(f) for f in fields(cls)]
    assert len(set(variables)) == len(variables)
    assert {name for name in variables if not name.startswith("KVROUTE_")} == {"REDIS_URL"}


def test_tenant_weights_are_parsed_from_names_and_numbers():
    assert parse_weights("") == {}
    assert parse_weights("a=4,b=0.5,c=d=2") == {"a": 4.0, "b": 0.5, "c=d": 2.0}


@pytest.mark.parametrize(
    "text",
    ["a", "a=", "a=heavy", "a=4,a=heavy", "=1", "a=1001", "a=4, b=1", f"{'a' * 65}=1", "ä=1"],
)
def test_bad_tenant_weights_are_refused_with_the_expected_format(text):
    with pytest.raises(ValueError, match="needs a name and a weight from"):
        parse_weights(text)


def test_wait_above_s_applies_only_if_requests_may_wait():
    assert RouterSettings(wait_queue=0, wait_above_s=2.0).max_queue_s == math.inf
    assert RouterSettings(wait_above_s=2.0).max_queue_s == 2.0


def test_a_workers_id_and_address_default_to_those_of_its_host(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    settings = WorkerSettings(port=9001)
    assert settings.resolved_id() == "node7"
    assert settings.resolved_address() == "http://127.0.0.1:9001"
    assert WorkerSettings(host="0.0.0.0", port=9001).resolved_address() == "http://node7:9001"
    assert WorkerSettings(host="::1", port=9001).resolved_address() == "http://[::1]:9001"
    assert WorkerSettings(host="::", port=9001).resolved_address() == "http://node7:9001"
    named = WorkerSettings(worker_id="w1", address="https://w1.example")
    assert named.resolved_id() == "w1"
    assert named.resolved_address() == "https://w1.example"


@pytest.mark.parametrize(
    "url", ["http://w1", "https://w1.example:8443/engines/1", "http://[::1]:9001", ""]
)
def test_a_base_url_is_accepted(url):
    check_base_url(url)


@pytest.mark.parametrize(
    "text",
    [
        "w1:9001",
        "http://",
        "http://:9001",
        "ftp://w1",
        "http://::1:9001",
        "http://[::1",
        "http://w1:port",
        "http://w1:65536",
        "http://w1:0",
        "http://w1?path=",
        "http://w1#1",
    ],
)
def test_an_address_that_is_not_the_base_url_of_a_host_is_refused(text):
    refusal = f"{text!r} is not the http:// or https:// base URL of a host"
    with pytest.raises(ValueError, match=re.escape(refusal)):
        check_base_url(text)


@pytest.mark.parametrize("check", [check_base_url, parse_engines])
@pytest.mark.parametrize("url", ["http://w1:8000/v1", "http://w1/engines/v1/"])
def test_the_v1_of_an_openai_client_is_no_part_of_a_base_url(check, url):
    with pytest.raises(ValueError, match="leave out /v1"):
        check(url)
