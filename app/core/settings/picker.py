"""Settings of an endpoint picker."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.settings.kinds import COMMON, PORT, Integers, setting
from app.core.settings.router import RouterSettings

OF_CARRIAGE = (
    *("shared_fd", "migrate", "stalled_s", "comment_every_s", "kv_lease_s", "strict_roles"),
)
"""Settings of a router that say how it carries requests, which a gateway does in its place."""


@dataclass(frozen=True, slots=True)
class PickerSettings(RouterSettings):
    """A router replica that tells a gateway where each request goes."""

    grpc_port: int = setting(
        9002,
        "Port on which gateways ask, by gRPC; 0 takes a free one.",
        PORT,
        heading=COMMON,
        often=True,
    )
    send_ids: bool = setting(
        False,
        "Requests go on to engines with the ids of their prompts, which then need not tokenize "
        "them again.",
        bool,
        heading="Gateway",
        often=True,
    )
    fallbacks: int = setting(
        2,
        "Further workers that a gateway is told, in turn, for a request that does not reach its "
        "own.",
        Integers(0, 15),
        often=True,
    )
    obey_test_header: bool = setting(
        False,
        "Obey the header test-epp-endpoint-selection, by which tests of gateways choose workers.",
        bool,
    )
