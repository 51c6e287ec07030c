"""The README and the other documents say what the code does."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import shown_default, variable
from app.core.settings.planner import PlannerSettings
from app.core.settings.router import PickerSettings, RouterSettings
from app.core.settings.worker import WorkerSettings
from app.edge.app import create_app
from app.planner.metrics import PlannerMetrics
from app.policy.policies import POLICIES
from workers import engine_agent
from workers.bridge.metrics import FAMILIES

ROOT = Path(__file__).parents[1]
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
POLICIES_PAGE = (ROOT / "docs/policies.md").read_text()
DOCUMENTS = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/**/*.md")))]


@pytest.mark.parametrize(
    "settings",
    [RouterSettings, PickerSettings, WorkerSettings, EngineAgentSettings, PlannerSettings],
    ids=lambda s: s.__name__,
)
def test_the_configuration_table_has_every_setting_with_its_default_and_help(settings):
    rows = [line for line in CONFIGURATION.splitlines() if line.startswith("| `--")]
    for f in fields(settings):
        flag = f"`--{f.name.replace('_', '-')}`"
        default = f"`{shown_default(f)}`" if shown_default(f) else ""
        assert f"| {flag} | {default} | {f.metadata['help']} |" in rows
        assert variable(f) == f"KVROUTE_{f.name.upper()}" or f"is `{variable(f)}`" in CONFIGURATION


def test_every_setting_is_used_by_a_test_or_named_by_a_page_a_deployment_or_a_load_test():
    deployed = [path for path in ROOT.glob("deploy/**/*") if path.suffix != ".pyc"]
    used = [*ROOT.glob("tests/**/*.py"), *deployed, *ROOT.glob("loadtest/**/*.py")]
    pages = [ROOT / page for page in DOCUMENTS if page != "docs/configuration.md"]
    text = "\n".join(path.read_text() for path in (*used, *pages) if path.is_file())
    words = {
        word.replace("-", "_").removeprefix("no_") for word in re.findall(r"[a-z][\w-]*", text)
    }
    words |= {word.removeprefix("KVROUTE_").lower() for word in re.findall(r"KVROUTE_\w+", text)}
    kinds = (PickerSettings, WorkerSettings, EngineAgentSettings, PlannerSettings)
    settings = {f.name.removeprefix("no_") for kind in kinds for f in fields(kind)}
    assert settings - words == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_metric_that_a_document_names_exists(document):
    router = create_app(RouterSettings()).replica.router
    planner = PlannerMetrics("test")
    families = [*router.telemetry.registry.collect(), *planner.registry.collect()]
    existing = {family.name for family in families}
    existing |= {f"{f.name}_total" for f in families if f.type == "counter"}
    existing |= {f"{f.name}_bucket" for f in families if f.type == "histogram"}
    of_workers = (ROOT / "workers/metrics.py").read_text()
    existing |= set(re.findall(r"kvroute_engine_[a-z_]+", of_workers))
    existing |= {f"{name}_total" for name in existing if name.endswith(("_events", "_connections"))}
    of_agents = {family.name for family in (*FAMILIES, *engine_agent.FAMILIES)}
    discovery = (ROOT / "workers/discovery/fleet.py").read_text()
    of_agents |= set(re.findall(r"kvroute_agent_[a-z_]+", discovery))
    existing |= of_agents | {f"{name}_total" for name in of_agents}
    text = (ROOT / document).read_text().partition("## What is gone")[0]
    assert set(re.findall(r"kvroute_[a-z_]+\b(?!\.\.\.)", text)) - existing == set()


def test_every_policy_is_explained():
    explained = POLICIES_PAGE.split("## Policies")[1].split("##")[0]
    assert {name for name in POLICIES if f"| `{name}` |" in explained} == set(POLICIES)
