"""GuideLLM, as its own command: with_guidellm.py URL MODEL"""

import json
import os
import subprocess
import sys
from pathlib import Path

URL, MODEL = sys.argv[1:]
TOKENIZER = Path(__file__).parents[3] / "workers" / "engines" / "sim" / "tokenizer"
REPORT = Path("report.json").absolute()

subprocess.run(
    [
        *(Path(sys.executable).with_name("guidellm"), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={URL},model={MODEL}"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=8"),
        *("--tokenizer", f"kind=hf_auto,model={TOKENIZER}"),
        *("--output", f"kind=json,path={REPORT}"),
    ],
    env=os.environ | {"HF_HUB_OFFLINE": "1"},
    check=True,
    timeout=500,
)
(benchmark,) = json.loads(REPORT.read_text())["benchmarks"]
totals = benchmark["metrics"]["request_totals"]
assert (totals["successful"], totals["errored"]) == (3, 0), totals
