"""Whether KV can travel between a namespace's workers, as far as they say; and what nobody sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from app.core.check import Check, page
from app.core.errors import cut
from app.core.roles import Role
from app.core.worker_report import WorkerInfo
from app.policy.pairing import differences, group_of, unknown_of

MIN_LEASE_S = 120.0
MINUTES = f"{MIN_LEASE_S:g} s or more"


def of_transfers(infos: Sequence[WorkerInfo]) -> Iterator[Check]:
    """Nothing where no worker hands KV on, or has a role."""
    able = [info for info in infos if info.kv_transfer]
    if not able and all(info.role is Role.BOTH for info in infos):
        return
    protocols = Counter(info.kv_transfer for info in able)
    shown = ", ".join(f"{name} ({number})" for name, number in sorted(protocols.items()))
    yield Check(
        "kv transfer",
        len(protocols) == 1 and len(able) > 1,
        shown or "by none",
        "give two workers or more the same --kv-transfer: KV travels between those alone",
    )
    yield _roles(able)
    yield _pairs(able)
    yield from _leases(able)
    if "nixl" in protocols:
        yield Check(
            "kv transfer settings",
            None,
            "engines do not tell them: kv_load_failure_policy recompute belongs in each "
            "--kv-transfer-config, and each must reach the other's side channel: see "
            f"{page('disaggregation.md')}",
        )


def _pairs(able: Sequence[WorkerInfo]) -> Check:
    """Whether all may use each other's KV."""
    told = [f"{name}: {_by_value(values)}" for name, values in differences(able)]
    silent = {str(info.key): unknown_of(info) for info in able if group_of(info) is None}
    told += [f"{key} does not tell its {', '.join(names)}" for key, names in silent.items()]
    return Check(
        "kv transfer pairs",
        not told,
        cut("; ".join(told)) or "all are equal in what decides whether KV is right elsewhere",
        "KV travels between equals alone: start engines alike. Where one does not tell, give its "
        "agent --side-channel-port, or all agents of engines that are alike one --kv-compatible",
    )


def _by_value(values: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{value or 'none'} ({', '.join(keys)})" for value, keys in values.items())


def _leases(able: Sequence[WorkerInfo]) -> Iterator[Check]:
    """How long sources keep what waits to be fetched, as far as that is known."""
    told = Counter(info.kv_lease_s for info in able if info.kv_lease_s)
    if not told:
        return
    shown = ", ".join(f"{seconds:g} s ({number})" for seconds, number in sorted(told.items()))
    is_short = any(i.kv_transfer == "nixl" and 0 < i.kv_lease_s < MIN_LEASE_S for i in able)
    yield Check(
        "kv transfer lease",
        None if is_short else True,
        f"{shown}, for sure"
        + (f"; a kv_lease_duration of {MINUTES} loses less, and waits less" if is_short else ""),
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
