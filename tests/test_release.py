"""`make release`: what it builds without a network, and how its images would run."""

import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import yaml

from app.local.redis_server import free_port
from tests.chart.rendering import TOOLS
from tests.e2e.engines import engine
from tests.edge.test_tls import Authority
from tests.eventually import eventually
from tests.test_install import Installed, wheel
from tools.release import IMAGES, ReleaseError, release, version_of

__all__ = ["wheel"]

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
DOCKER = """\
#!/bin/sh
# Stands in for docker buildx, which needs a daemon: writes a digest for each target.
while [ $# -gt 0 ]; do
    case $1 in
        --target) target=$2 ;;
        --metadata-file) file=$2 ;;
        --sbom=true) sbom=1 ;;
    esac
    shift
done
[ "$sbom" = 1 ] && printf '{"containerimage.digest": "sha256:%064d"}' "${#target}" >"$file"
"""


def test_the_version_is_that_of_the_tag():
    exact, later = version_of("v1.2.3-0-gabc1234"), version_of("v1.2.3-4-gabc1234")
    assert (exact.python, exact.chart, exact.tag) == ("1.2.3", "1.2.3", "1.2.3")
    assert later.python == "1.2.3.post4+abc1234"
    assert (later.chart, later.tag) == ("1.2.3-post.4+abc1234", "1.2.3-post.4-abc1234")
    with pytest.raises(ReleaseError, match="no tag vX"):
        version_of("nightly-0-gabc1234")


@pytest.fixture
def tagged(tmp_path, monkeypatch):
    """A clone of this checkout as it is, with a tag."""
    clone = tmp_path / "clone"
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, files.split("\0")):
        if (ROOT / name).exists():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name, follow_symlinks=False)
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    for command in (
        ("init", "-q"),
        ("add", "-A"),
        (*author, "commit", "-qm", "All"),
        (*author, "tag", "v7.8.9"),
    ):
        subprocess.run(["git", *command], cwd=clone, check=True)
    monkeypatch.setattr("tools.release.ROOT", clone)
    monkeypatch.setenv("HELM", str(TOOLS / "helm"))
    return tmp_path


@pytest.mark.chart
def test_a_release_has_wheel_sdist_chart_sums_and_a_page(tagged, monkeypatch):
    (tagged / "docker").write_text(DOCKER)
    (tagged / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tagged}:{os.environ['PATH']}")
    folder = release(tagged / "out", "registry.example/llm")
    assert folder.name == "7.8.9"
    names = {path.name for path in folder.iterdir()}
    built = {"kvroute-7.8.9-py3-none-any.whl", "kvroute-7.8.9.tar.gz", "kvroute-7.8.9.tgz"}
    assert names == built | {"SHA256SUMS", "RELEASE.md"}
    for line in (folder / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    told = (folder / "RELEASE.md").read_text()
    assert [name for name in built if f"| `{name}` |" not in told] == []
    assert "### Added" in told
    rendered = subprocess.run(
        [TOOLS / "helm", "template", "kvroute", folder / "kvroute-7.8.9.tgz"],
        capture_output=True,
        check=True,
    ).stdout
    images = re.findall(r"image: (registry\S+)", rendered.decode())
    assert f"registry.example/llm/kvroute-router:7.8.9@sha256:{len('router'):064d}" in images
    with tarfile.open(folder / "kvroute-7.8.9.tar.gz") as sources:
        assert "kvroute-7.8.9/lua/reserve.lua" in sources.getnames()


@pytest.mark.chart
def test_without_a_tag_there_is_no_release(tagged):
    subprocess.run(["git", "tag", "-d", "v7.8.9"], cwd=tagged / "clone", check=True)
    with pytest.raises(ReleaseError, match=r"begin with `git tag vX.Y.Z`"):
        release(tagged / "out", "")


def stage(target):
    return DOCKERFILE.split(f"AS {target}\n")[1].split("\nFROM ")[0]


def test_the_images_of_a_release_are_targets_with_labels():
    for target in IMAGES:
        assert f"FROM base AS {target}\n" in DOCKERFILE
    base = stage("base")
    for label in ("title", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in base


@pytest.fixture(params=IMAGES)
def image(request):
    return str(request.param)


@contextmanager
def running(installed, image, **variables):
    [command] = re.findall(r"^CMD (.*)$", stage(image), re.MULTILINE)
    program, *arguments = json.loads(command)
    assert program == "kvroute"
    told = dict(re.findall(r"(KVROUTE_\w+)=(\S+)", stage(image)))
    with installed.running(*arguments, **{**told, **variables}) as process:
        yield process


@pytest.mark.slow
async def test_an_image_starts_with_its_extras_alone_and_its_check_finds_it_well(
    image, wheel, tmp_path, own_redis_server
):
    [extras] = re.findall(r"'\.\[([\w,]+)\]'|\"\.\[(\$\w+)\]\"", stage(f"build-{image}"))
    extra = "".join(extras).replace("$WORKER_EXTRA", "worker")
    installed = Installed(Path(sys.executable), wheel, tmp_path / image, extra)
    port = str(free_port())
    variables = {"REDIS_URL": own_redis_server.url, "KVROUTE_PORT": port}
    variables |= {"KVROUTE_API_KEY": "k", "KVROUTE_NO_AUTH": "", "KVROUTE_WORKER_KEY": "k"}
    variables |= {"KVROUTE_ADDRESS": f"http://127.0.0.1:{port}"} if image == "worker" else {}
    if image == "router":
        cert, key = Authority().issue(tmp_path)
        variables |= {"KVROUTE_TLS_CERT": cert, "KVROUTE_TLS_KEY": key}
    [check] = re.findall(r"HEALTHCHECK .*\\\n +CMD (\[.*\])", stage(image))
    program, *arguments = json.loads(check)

    async def is_well():
        command = [installed.program(program), *arguments]
        asked = partial(subprocess.run, command, env={"KVROUTE_PORT": port}, check=False)
        return (await asyncio.to_thread(asked)).returncode == 0

    assert not await is_well()
    with engine() as beside:
        variables |= {"KVROUTE_ENGINE_URL": beside.url} if image == "agent" else {}
        with running(installed, image, **{n: v for n, v in variables.items() if v}):
            await eventually(is_well)
    if image == "router":  # A picker, with traces, too.
        installed.said("picker", "--help")
        installed.said("-c", "import h2, opentelemetry.sdk", program="python")


def test_a_check_wants_a_port_that_answers():
    command = [sys.executable, "-m", "deploy.healthcheck", "PORT"]
    ended = subprocess.run(command, cwd=ROOT, env={"PORT": str(free_port())})
    assert ended.returncode == 1


def test_nothing_tells_to_install_kvroute_from_where_it_is_not():
    """Anybody could take its name there."""
    told = re.compile(r"pip install[^\n]{0,40}[ '\"]kvroute(\[|['\"\s])")
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    files += [
        path
        for room in ("app", "workers", "loadtest", "deploy")
        for path in (ROOT / room).rglob("*.py")
    ]
    assert [str(path) for path in files if told.search(path.read_text())] == []


def test_the_chart_of_this_checkout_names_no_digests():
    values = yaml.safe_load((ROOT / "deploy/chart/values.yaml").read_text())
    assert values["image"]["digests"] == {}
