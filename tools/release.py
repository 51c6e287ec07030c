"""Builds a release of the commit that is checked out, into out/release/VERSION.

python -m tools.release [--registry REGISTRY] [--out FOLDER]

The version is that of the tag vX.Y.Z; after it, X.Y.Z.postN+COMMIT. Made without a network: wheel,
sdist, the chart, SHA256SUMS and RELEASE.md. With --registry the four images are built and pushed,
each with its SBOM and provenance, and the chart names them by digest. Wants git, hatchling and helm
(HELM, or on the path); for images, docker with buildx.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ("router", "worker", "agent", "planner")
VERSION = re.compile(r"(?<=^version = \")[^\"]+", re.MULTILINE)
DESCRIBED = re.compile(r"v(\d+\.\d+\.\d+)-(\d+)-g([0-9a-f]+)")
KINDS = {
    ".whl": "kvroute, to install: `pip install 'FILE[worker]'`, with the extras that are needed",
    ".tar.gz": "its sources",
    ".tgz": "the Helm chart: `helm install kvroute FILE`",
}


class ReleaseError(Exception):
    """An error: there is nothing to release, or a program failed."""


@dataclass(frozen=True, slots=True)
class Version:
    """python: as wheels have it. chart: as charts have it. tag: as images have it."""

    python: str
    chart: str
    tag: str
    commit: str


def version_of(described: str) -> Version:
    """described: what `git describe --long` says. Raises ReleaseError if it names no version."""
    if (match := DESCRIBED.fullmatch(described)) is None:
        raise ReleaseError(f"{described!r} is no tag vX.Y.Z")
    number, since, commit = match.groups()
    if since == "0":
        return Version(number, number, number, commit)
    chart = f"{number}-post.{since}+{commit}"
    return Version(f"{number}.post{since}+{commit}", chart, chart.replace("+", "-"), commit)


def said(*command: str | Path, cwd: Path | None = None) -> bytes:
    """Runs a command in `cwd` or the checkout, and returns what it writes. Raises ReleaseError,
    with what it says, if it fails."""
    try:
        done = subprocess.run(command, cwd=cwd or ROOT, capture_output=True, check=False)
    except OSError as error:
        raise ReleaseError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise ReleaseError(f"{command[0]}: {(done.stderr or done.stdout).decode().strip()}")
    return done.stdout


def export(version: Version, folder: Path) -> None:
    """Write what is committed into `folder`, with that version in place of the one in the files."""
    with tarfile.open(fileobj=BytesIO(said("git", "archive", "HEAD"))) as archive:
        archive.extractall(folder, filter="tar")
    project, chart = folder / "pyproject.toml", folder / "deploy/chart/Chart.yaml"
    project.write_text(VERSION.sub(version.python, project.read_text(), count=1))
    text = re.sub(r"^version: .*", f"version: {version.chart}", chart.read_text(), flags=re.M)
    chart.write_text(re.sub(r"^appVersion: .*", f"appVersion: {version.tag}", text, flags=re.M))


def build_images(source: Path, version: Version, registry: str) -> dict[str, str]:
    """Build and push each image. Returns their digests, by target."""
    digests = {}
    for target in IMAGES:
        told = source / f"{target}.json"
        name = f"{registry}/kvroute-{target}:{version.tag}"
        said(
            *("docker", "buildx", "build", "--target", target, "--tag", name, "--push"),
            *("--build-arg", f"VERSION={version.tag}", "--build-arg", f"REVISION={version.commit}"),
            *("--sbom=true", "--provenance=true", "--metadata-file", told, source),
        )
        digests[target] = json.loads(told.read_text())["containerimage.digest"]
    return digests


def name_images(source: Path, registry: str, digests: dict[str, str]) -> None:
    """Have the chart's values name these images."""
    values = source / "deploy/chart/values.yaml"
    text = values.read_text().replace('  registry: ""', f"  registry: {registry}", 1)
    values.write_text(text.replace("  digests: {}", f"  digests: {json.dumps(digests)}", 1))


def changes(source: Path, version: Version) -> str:
    sections = re.split(r"^## ", (source / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    by_name = {text.split("]")[0].lstrip("["): text.partition("\n")[2] for text in sections}
    return by_name.get(version.python, by_name.get("Unreleased", "")).strip()


def page(source: Path, files: list[Path], version: Version, images: dict[str, str]) -> str:
    """The release page: what it has in it, and what has changed."""
    kinds = [(f.name, next(v for end, v in KINDS.items() if f.name.endswith(end))) for f in files]
    rows = [f"| `{name}` | {kind.replace('FILE', name)} |" for name, kind in kinds]
    rows += [f"| `{name}` | image, with its SBOM |" for name in images.values()]
    return "\n".join(
        (
            f"# kvroute {version.python}",
            f"\nCommit {version.commit}. `sha256sum --check SHA256SUMS` checks the files.\n",
            *("| | |", "|---|---|", *rows),
            f"\n{changes(source, version)}\n",
        )
    )


def release(out: Path, registry: str) -> Path:
    """Build all into a folder of `out`, which is returned. Raises ReleaseError."""
    try:
        described = said("git", "describe", "--tags", "--long", "--match", "v[0-9]*")
    except ReleaseError as error:
        raise ReleaseError(f"{error}: begin with `git tag vX.Y.Z`") from None
    version = version_of(described.decode().strip())
    folder = out / version.python
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary)
        export(version, source)
        said(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=source)
        images = {}
        if registry:
            digests = build_images(source, version, registry)
            name_images(source, registry, digests)
            images = {t: f"{registry}/kvroute-{t}@{digest}" for t, digest in digests.items()}
        helm = os.environ.get("HELM", "helm")
        said(helm, "package", source / "deploy/chart", "--destination", folder)
        files = sorted(folder.iterdir())
        (folder / "RELEASE.md").write_text(page(source, files, version, images))
    sums = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in files]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a release.")
    parser.add_argument("--registry", default="", help="where images go; unset: none are built")
    parser.add_argument("--out", type=Path, default=ROOT / "out/release")
    asked = parser.parse_args()
    try:
        print(release(asked.out.resolve(), asked.registry))  # noqa: T201 - where it is
    except ReleaseError as error:
        sys.exit(f"release: {error}")


if __name__ == "__main__":
    main()
