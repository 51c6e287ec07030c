"""Whether KV can travel between a namespace's workers, as far as they say; and what nobody sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from app.core.check import Check
from app.core.documents import page
from app.core.worker_report import Role, WorkerInfo

MINUTES = "120 s or more"


def of_transfers(infos: Sequence[WorkerInfo]) -> Iterator[Check]:
    """Nothing where no worker hands KV on, or has a role."""
    able = [info for info in infos if info.kv_transfer]
    if not able and all(info.role is Role.BOTH for info in infos):
        return
    ways = Counter(info.kv_transfer for info in able)
    shown = ", ".join(f"{way} ({number})" for way, number in sorted(ways.items()))
    yield Check(
        "kv transfer",
        len(ways) == 1 and len(able) > 1,
        shown or "in none",
        "give two workers or more the same --kv-transfer: KV travels in one way, between those",
    )
    yield _roles(able)
    engines = sorted({info.engine for info in able})
    yield Check(
        "kv transfer engines",
        len(engines) <= 1,
        ", ".join(engines) or "none",
        "run one version on both sides: what one sends the other must read",
    )
    if "nixl" in ways:
        yield Check(
            "kv transfer lease",
            None,
            f"engines do not tell it: kv_lease_duration of {MINUTES} and kv_load_failure_policy "
            "recompute belong in each --kv-transfer-config, and the same seconds in the routers' "
            "--kv-lease-s; dtype and layout must be alike, and each must reach the other's side "
            f"channel: see {page('disaggregation.md')}",
        )


def _roles(able: Sequence[WorkerInfo]) -> Check:
    """A worker with a role needs one that does the other half."""
    number = Counter(info.role for info in able)
    wanted = "prefill" if number[Role.DECODE] else "decode"
    is_alone = not number[Role.BOTH] and len(number) == 1
    return Check(
        "roles",
        not is_alone,
        ", ".join(f"{role.value} ({count})" for role, count in number.items()) or "none transfers",
        f"start a worker with --role {wanted}, or without one",
    )
