"""deploy/envoy.yaml, for pickers and engines with other addresses than it has."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

Place = tuple[str, int]
_FAIL_SHUT = "failure_mode_allow: false"
_HTTP_2 = "typed_extension_protocol_options: *http2"
_ANSWERS = "response_body_mode: FULL_DUPLEX_STREAMED"


def rendered(
    listens: Place,
    pickers: Sequence[Place],
    engines: Sequence[Place],
    *,
    fail_open: bool = False,
    http_2: bool = False,
    answers: str = "FULL_DUPLEX_STREAMED",
) -> str:
    """http_2: engines get it. answers: how their bodies pass pickers; NONE: not at all."""
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
    """`text` with its line of that address once for each of the others."""
    said = _said(place)
    [line] = [line for line in text.splitlines() if said in line]
    return text.replace(line, "\n".join(line.replace(said, _said(other)) for other in others))


def _said(place: Place) -> str:
    host, port = place
    return f"{{address: {host}, port_value: {port}}}"
