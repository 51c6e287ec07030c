"""Options of what plays a trace in virtual time: policies, and the fleet."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from app.core.roles import Role
from app.core.settings.kinds import LONGEST_S
from app.options import COUNT, FACTOR, PROCESSES, Number
from app.policy.policies import POLICIES
from app.simulation.profiles import PROFILES, Link
from app.simulation.setting import PolicyVariant, Setting, Sharing
from loadtest.command import option
from loadtest.scenario import IDEAL

MILLISECONDS = Number(0, 1000 * LONGEST_S)
WEIGHT = Number(0, 1_000_000)


class PolicyName(click.ParamType[str]):
    """A policy's name, `blocks:W`, or `ideal`."""

    name = "policy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == IDEAL:
            return IDEAL
        try:
            policy = PolicyVariant(value)
            weight = policy.weight
            if policy.key not in POLICIES or (weight is not None and policy.key != "blocks"):
                raise ValueError
            if weight is not None:
                WEIGHT.convert(weight, param, ctx)
        except ValueError:
            self.fail(
                f"{value!r} is none of {', '.join(POLICIES)}, blocks:WEIGHT, ideal", param, ctx
            )
        return str(value)


class _Roles(click.ParamType[tuple[Role, ...]]):
    """Numbers of workers with a role, such as 2p6d or 8b."""

    name = "roles"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Role, ...]:
        if not re.fullmatch(r"([1-9][0-9]{0,3}[pdb])+", value):
            self.fail(f"{value!r} is not like 2p6d (prefill, decode) or 8b (both)", param, ctx)
        letters = {role.value[0]: role for role in Role}
        groups = re.findall(r"([0-9]+)([pdb])", value)
        roles = tuple(letters[letter] for number, letter in groups for _ in range(int(number)))
        if set(roles) == {Role.PREFILL}:
            self.fail(f"{value!r} has no worker that decodes", param, ctx)
        return roles


ROLES = _Roles()


_OPTIONS = (
    option("--workers num_workers", 8, "Number of workers."),
    option(
        "--profile profiles",
        ("70b-4xh100",),
        "Timing of the workers. If several are given, workers of unequal speed take them in turn.",
        click.Choice(list(PROFILES)),
        multiple=True,
    ),
    option("--host-tokens", 0, "Host tokens per worker.", COUNT),
    option(
        "--roles",
        None,
        "Of the workers, such as 2p6d (2 prefill, 6 decode) or 8b (both), in place of --workers.",
        ROLES,
    ),
    option("--link-gbit", None, "Gbit/s at which KV leaves a worker. Default: none does.", FACTOR),
    option("--block-size", 256, "Tokens per KV block."),
    option("--replicas", 1, "Number of router replicas.", PROCESSES),
    option(
        "--sharing",
        "exact",
        "What replicas know about each other's reservations.",
        click.Choice([str(sharing) for sharing in Sharing]),
    ),
    click.option(
        "--priorities",
        is_flag=True,
        help="Heed the priorities that the trace's requests name, in prices and in line. Default: "
        "all are alike.",
    ),
    option(
        "--wait-above-s",
        None,
        "Requests wait, in one fair queue, while every worker's queue of prefills is longer, "
        "as at routers with --wait-queue. Default: they never do.",
        Number(0, LONGEST_S),
    ),
)


def setting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options of a fleet, for `setting_of`."""
    for add in reversed(_OPTIONS):
        command = add(command)
    return command


def setting_of(
    sharing: str,
    host_tokens: int,
    roles: tuple[Role, ...] | None,
    link_gbit: float | None,
    num_workers: int,
    profiles: tuple[str, ...],
    **same: Any,
) -> Setting:
    """Raises UsageError for roles without a link."""
    if link_gbit is None and roles:
        raise click.UsageError("--roles needs --link-gbit, by which KV travels")
    return Setting(
        num_workers=len(roles) if roles else num_workers,
        profiles=tuple(PROFILES[name] for name in profiles),
        roles=roles or (Role.BOTH,),
        link=None if link_gbit is None else Link(link_gbit * 1e9 / 8),
        sharing=Sharing(sharing),
        host_pool_tokens=host_tokens,
        **same,
    )
