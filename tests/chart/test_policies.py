"""NetworkPolicies let the parts connect as they do."""

from itertools import permutations

from tests.chart.installed import selects

ELSEWHERE = {53, 80, 443, 4318, 6379, 6443, 26379}
"""Ports of what is no part of the chart: more than are needed, to see that they are closed."""
EVENTS = {5557, 5657, 5600}
"""Ports at which agents ask engines for events, and for KV facts."""
SSH = 22
"""A port that nobody needs."""


def connections(installed):
    """(from, to, port) of each that the parts make; client: any pod of theirs, Prometheus too."""
    parts, engines = installed.pods.keys(), installed.engines()
    redis = [6379, 26379] if installed.example == "ha" else [6379]
    of_redis = "redis" if "redis" in parts else "elsewhere"
    agents = {part for part in parts if part.endswith("agent")}
    discovers = bool(agents)
    made = {
        (part, of_redis, port)
        for part in parts - {"redis"} - (engines if discovers else set())
        for port in redis
    }
    made |= {(part, "elsewhere", 53) for part in parts - {"redis"}}
    made |= {("router", engine, 8000) for engine in engines}
    made |= {("router", "worker", 8081) for part in parts if part == "worker"}
    callers = ("client", "elsewhere") if installed.example == "ha" else ("client",)
    for part in parts - {"redis"}:
        made |= {(caller, part, port) for port in installed.ports(part) for caller in callers}
    made |= {(engine, "elsewhere", 443) for engine in engines}  # Models, and tokenizers.
    if installed.downloads():
        made |= {("router", "elsewhere", 443)}
    if installed.example in ("ha", "placement"):
        made |= {("router", "elsewhere", 4318)}
    if discovers:
        made |= {("agent", engine, port) for engine in engines for port in {8000} | EVENTS}
    asking = {"split": {"planner"}, "models": {"chat-planner"}}.get(installed.example, set())
    for part in asking | agents:  # The API server.
        made |= {(part, "elsewhere", 443), (part, "elsewhere", 6443)}
    if installed.example in ("split", "discovery"):  # KV, at any port.
        for one, other in permutations(engines, 2):
            made |= {(one, other, port) for port in installed.ports(other) | EVENTS | {SSH}}
    return made


def lets(installed, way, pod, peer, port):
    """Whether the policies of `pod` let it talk with `peer`. way: Ingress or Egress."""
    policies = [
        policy["spec"]
        for policy in installed.of_kind("NetworkPolicy")
        if selects(policy["spec"]["podSelector"], installed.pods[pod]["metadata"]["labels"])
    ]
    assert all(policy["policyTypes"] == ["Ingress", "Egress"] for policy in policies)
    peers = "from" if way == "Ingress" else "to"
    labels = installed.pods[peer]["metadata"]["labels"] if peer in installed.pods else {}
    return not policies or any(
        port in [each["port"] for each in rule.get("ports", [{"port": port}])]
        and (
            peers not in rule
            or any(
                peer != "elsewhere" and selects(each["podSelector"], labels)
                if "podSelector" in each
                else peer == "elsewhere"
                for each in rule[peers]
            )
        )
        for policy in policies
        for rule in policy.get(way.lower(), [])
    )


def test_policies_let_the_parts_connect_to_each_other_as_they_do_and_in_no_other_way(installed):
    parts = installed.pods.keys()
    ports = {part: installed.ports(part) | {SSH} for part in parts} | {"elsewhere": ELSEWHERE}
    for engine in installed.engines():
        ports[engine] |= EVENTS
    let = {
        (pod, peer, port)
        for pod in parts
        for peer in ports
        for port in ports[peer]
        if pod != peer and lets(installed, "Egress", pod, peer, port)
        if peer == "elsewhere" or lets(installed, "Ingress", peer, pod, port)
    }
    let |= {
        (caller, peer, port)
        for caller in ("client", "elsewhere")
        for peer in parts
        for port in ports[peer]
        if lets(installed, "Ingress", peer, caller, port)
    }
    assert let == connections(installed)
