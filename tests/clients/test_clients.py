"""Clients that nobody here wrote, each in an environment of its own, against `kvroute up`."""

import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.clients.cluster import cluster
from tests.clients.comply import CLIENTS, FORMATS, run
from tests.gateway.envoy import ENVOY

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
MODEL, ALIAS = "llama", "llama-too"
"""Two names: with one, a request without a model is right, and llm-comply takes that as wrong."""
DEADLINE_S = 600
OF_NODE = sorted(path.name for path in HERE.glob("scripts/*.mjs"))
OF_PYTHON = {
    "openai": ("openai", "anthropic", "langchain", "openai_agents", "pydantic_ai", "locust"),
    "others": ("llama_index", "instructor"),
    "litellm": ("litellm", "litellm_proxy"),
    "guidellm": ("guidellm",),
}
"""Environment -> the clients in it."""


GIVEN = os.environ.get("KVROUTE_TEST_URL")


@pytest.fixture(scope="module", params=["given"] if GIVEN else ["doors", "gateway"])
def url(request, tmp_path_factory):
    """The URL in KVROUTE_TEST_URL, or of a cluster with stand-ins for engines: its front doors, or
    an Envoy that asks pickers, where `make test-gateway` has installed one."""
    if GIVEN:
        yield GIVEN
        return
    log = tmp_path_factory.mktemp("cluster") / "log"
    options = ["--replicas", "2"]
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "gateway":
            if not ENVOY.exists():
                pytest.skip(f"there is no {ENVOY}")
            patch.setenv("PATH", f"{ENVOY.parent}{os.pathsep}{os.environ['PATH']}")
            options += ["--gateway", "envoy"]
        with cluster(log, *options, model=f"{MODEL},{ALIAS}") as url:
            yield url


@pytest.fixture(scope="module")
def model(url):
    return httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]


def _run(*command, cwd):
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=cwd)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_expected_of_a_compatible_api_is_there(url, model, form):
    """But for what the suite itself skips for other models: reasoning."""
    became = run(url, model, form)
    wrong = {case: what for case, what in became.items() if what not in ("passed", "skipped")}
    assert len(became) >= 9
    assert not wrong


@pytest.mark.parametrize(
    ("environment", "client"),
    [(environment, client) for environment, names in OF_PYTHON.items() for client in names],
)
def test_a_client_in_python_gets_what_it_asks_for(url, model, environment, client, tmp_path):
    script = HERE / "scripts" / f"with_{client}.py"
    # -P: else the folder of the script comes before the packages.
    _run(CLIENTS / environment / "bin" / "python", "-P", script, url, model, cwd=tmp_path)


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node")
@pytest.mark.parametrize("script", OF_NODE)
def test_a_client_in_node_gets_what_it_asks_for(url, model, script, tmp_path):
    # Node looks for packages from the folder of the script upwards.
    (tmp_path / "node_modules").symlink_to(CLIENTS / "node" / "node_modules")
    copied = shutil.copy(HERE / "scripts" / script, tmp_path)
    _run("node", copied, url, model, cwd=tmp_path)
