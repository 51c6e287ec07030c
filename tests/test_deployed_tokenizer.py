"""deploy/tokenizer.sh, and the routers of the examples that load what it downloads."""

from __future__ import annotations

import subprocess
import threading
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from app.core.settings import kinds
from app.core.settings.router import RouterSettings
from app.tokens import load
from tests.chart.rendering import golden
from tests.redis_servers import require_binary

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
MODEL = "owner/model"


class Hub(SimpleHTTPRequestHandler):
    """Files of one model, for whoever has the token."""

    token: str | None = None

    def do_GET(self):
        if self.token and self.headers["Authorization"] != f"Bearer {self.token}":
            self.send_error(401)
            return
        prefix = f"/{MODEL}/resolve/main"
        assert self.path.startswith(prefix)
        self.path = self.path.removeprefix(prefix)
        super().do_GET()

    def log_message(self, *_):
        pass


@contextmanager
def hub(folder, token=None):
    handler = type("Hub", (Hub,), {"token": token})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def download(into, endpoint, **more):
    require_binary("curl")
    return subprocess.run(
        ["sh", DEPLOY / "tokenizer.sh", MODEL, into],
        env={"PATH": "/usr/bin:/bin", "HF_ENDPOINT": endpoint, **more},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_routers_can_load_what_is_downloaded(tmp_path):
    with hub(ROOT / "tests/data/door/qwen", token="hf_x") as endpoint:
        done = download(tmp_path, endpoint, HF_TOKEN="hf_x")
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in tmp_path.iterdir()} == {
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    load(str(tmp_path))


def test_what_the_model_has_no_more_goes(tmp_path):
    (tmp_path / "chat_template.json").write_text("{}")
    with hub(ROOT / "tests/data/door/qwen") as endpoint:
        assert download(tmp_path, endpoint).returncode == 0
    assert not (tmp_path / "chat_template.json").exists()


@pytest.mark.parametrize(
    ("folder", "token", "why"),
    [(ROOT / "docs", None, "owner/model has no tokenizer.json"), (ROOT, "hf_x", "status 401")],
)
def test_what_cannot_be_downloaded_is_named(tmp_path, folder, token, why):
    with hub(folder, token) as endpoint:
        done = download(tmp_path, endpoint)
    assert done.returncode == 1
    assert why in done.stderr


def _routers():
    for document in yaml.safe_load_all(golden("split").read_text()):
        if (document["kind"], document["metadata"]["name"]) == ("Deployment", "kvroute-router"):
            return dict(document["spec"]["template"]["spec"])
    raise AssertionError("no routers")


def _examples():
    """Returns for each the environment of its routers, their volumes, and its engines' model."""
    compose = yaml.safe_load((DEPLOY / "vllm.compose.yaml").read_text())["services"]
    [model] = [arg for arg in compose["vllm"]["command"] if arg.startswith("--model=")]
    router = compose["router"]
    routers = _routers()
    [container] = routers["containers"]
    return {
        "compose": (
            router["environment"],
            {text.split(":")[1]: text.split(":")[0] for text in router["volumes"]},
            model.removeprefix("--model="),
        ),
        "kubernetes": (
            {one["name"]: one["value"] for one in container["env"] if "TOKENIZER" in one["name"]},
            {one["mountPath"]: one["name"] for one in container["volumeMounts"]},
            routers["initContainers"][0]["args"][0],
        ),
    }


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_routers_of_the_examples_are_told_where_the_tokenizer_of_their_model_is(where):
    environment, volumes, model = _examples()[where]
    [variable] = [name for name in environment if name.startswith("KVROUTE_")]
    assert variable in {kinds.variable(field) for field in fields(RouterSettings)}
    assert environment[variable] == f"{model}=/tokenizer"
    assert volumes["/tokenizer"] == "tokenizer"


def test_both_examples_download_it_to_where_routers_read_it():
    compose = yaml.safe_load((DEPLOY / "vllm.compose.yaml").read_text())["services"]["tokenizer"]
    [first] = _routers()["initContainers"]
    assert compose["command"][1] == first["args"][1] == "/tokenizer"
    assert "tokenizer:/tokenizer" in compose["volumes"]
    assert {"name": "tokenizer", "mountPath": "/tokenizer"} in first["volumeMounts"]
    assert compose["image"] == first["image"]
