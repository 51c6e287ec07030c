"""Runs llm-comply's cases: `python -m tests.clients.comply URL MODEL [URL_OF_THE_ENGINE]`.

With the URL of an engine that answers alone, ends with 1 if a case passes there but not at URL.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

CLIENTS = Path(os.environ.get("KVROUTE_TEST_CLIENTS", Path(__file__).parents[2] / ".venv-clients"))
"""The folder that install_clients.sh fills."""
FORMATS = ("openai-chat", "open-responses", "anthropic")
DEADLINE_S = 600


def run(url, model, form):
    program = CLIENTS / "openai" / "bin" / "llm-comply"
    command = [program, "--base-url", f"{url}/v1", "--api-key", "any", "--model", model]
    done = subprocess.run(
        [*command, "--format", form, "--json"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    results = json.loads(done.stdout)["results"]
    return {r["id"]: r["status"] if r["status"] in _FINE else str(r["errors"]) for r in results}


_FINE = ("passed", "skipped", "warning")


def main(url, model, engine_url=""):
    """How many cases fail; with the URL of an engine, only those that pass there."""
    num_failed = 0
    for form in FORMATS:
        alone = run(engine_url, model, form) if engine_url else {}
        for case, became in run(url, model, form).items():
            at_engine = alone.get(case, "passed")
            sys.stdout.write(f"{form} {case}: {became}\n")
            num_failed += became not in _FINE and at_engine in _FINE
    return num_failed


if __name__ == "__main__":
    sys.exit(min(1, main(*sys.argv[1:])))
