"""HAProxy and Envoy in front of a cluster, with the configurations in deploy/."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

from app.core.settings.router import RouterSettings
from app.local.child import start_child

MOST_S = 86_400
"""Timeout of HAProxy, which knows none of more than 24 days."""
Place = tuple[str, int]
_FAIL_SHUT = "failure_mode_allow: false"
_HTTP_2 = "typed_extension_protocol_options: *http2"
_ANSWERS = "response_body_mode: FULL_DUPLEX_STREAMED"


def place_of(url: str) -> Place:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def start_haproxy(
    binary: Path, folder: Path, front: Place, urls: Sequence[str], router: RouterSettings
) -> subprocess.Popen[bytes]:
    servers = "".join(
        f"    server r{i} {url.removeprefix('http://')}\n" for i, url in enumerate(urls)
    )
    config = folder / "haproxy.cfg"
    config.write_text((files("deploy") / "haproxy.cfg").read_text() + servers)
    patience_s = min(round(router.wait_timeout_s), MOST_S) + 20
    answer_s = max(router.answer_timeout_s, router.whole_timeout_s, router.gap_timeout_s)
    environment = {
        **os.environ,
        "KVROUTE_BALANCER_HOST": front[0],
        "KVROUTE_BALANCER_PORT": str(front[1]),
        "KVROUTE_BALANCER_TIMEOUT": f"{patience_s}s",
        "KVROUTE_BALANCER_ANSWER_TIMEOUT": f"{min(round(answer_s), MOST_S) + 60}s",
    }
    return start_child([str(binary), "-db", "-f", str(config)], env=environment)


def start_envoy(
    binary: Path, folder: Path, front: Place, pickers: Sequence[Place], engines: Sequence[Place]
) -> subprocess.Popen[bytes]:
    config = folder / "envoy.yaml"
    config.write_text(rendered(front, pickers, engines))
    command = [str(binary), "-c", str(config), "-l", "error", "--disable-hot-restart"]
    return start_child(command)


def rendered(
    listens: Place,
    pickers: Sequence[Place],
    engines: Sequence[Place],
    *,
    fail_open: bool = False,
    http_2: bool = False,
    answers: str = "FULL_DUPLEX_STREAMED",
) -> str:
    """Returns deploy/envoy.yaml with these addresses. http_2: whether engines get HTTP/2. answers:
    how bodies of answers pass pickers; NONE: not at all."""
    text = (files("deploy") / "envoy.yaml").read_text()
    text = _with_places(text, ("0.0.0.0", 8080), [listens])  # noqa: S104 - what is replaced
    text = _with_places(text, ("pickers", 9002), pickers)
    text = _with_places(text, ("engines", 8000), engines)
    if fail_open:
        text = text.replace(_FAIL_SHUT, "failure_mode_allow: true")
    if http_2:
        text = text.replace(f"# {_HTTP_2}", _HTTP_2)
    return text.replace(_ANSWERS, f"response_body_mode: {answers}")


def _with_places(text: str, place: Place, others: Sequence[Place]) -> str:
    said = _said(place)
    [line] = [line for line in text.splitlines() if said in line]
    return text.replace(line, "\n".join(line.replace(said, _said(other)) for other in others))


def _said(place: Place) -> str:
    host, port = place
    return f"{{address: {host}, port_value: {port}}}"
