"""Records what vLLM makes of chats: the expectations of test_exactness.py.

    for family in chatml llama qwen parts; do
        cp -r tests/data/door/$family FOLDER
        cp CONFIG FOLDER/$family/config.json    # of any small Llama, with vocab_size 1000
        vllm launch render FOLDER/$family --served-model-name m --port 8500 \\
            --enable-auto-tool-choice --tool-call-parser hermes
        python -m tests.tokens.capture FOLDER/$family http://127.0.0.1:8500
    done

takes the bodies of chats.json, messages.json and responses.json in tests/data/door/chatml, and
writes files of these names to that folder: bodies, with the ids that each API's render answers;
null: it refuses. A new body goes into chatml's file, with null. And agents.json: the ids of what is
in agents.jsonl beside the folders, in its order.
"""

import json
import sys
from pathlib import Path

import httpx

DATA = Path(__file__).parents[1] / "data/door"
PATHS = {
    "chats": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}


def agents():
    """Path and body of what coding agents sent: see tests/clients/record.py."""
    lines = map(json.loads, (DATA / "agents.jsonl").read_text().splitlines())
    return [(line["path"], line["body"]) for line in lines]


def rendered(url, path, body):
    answer = httpx.post(f"{url}{path}/render", json=body | {"model": "m"}, timeout=30)
    assert answer.status_code in (200, 400), answer.text
    return answer.json()["token_ids"] if answer.status_code == 200 else None


def main(folder, url):
    for name, path in PATHS.items():
        cases = []
        for body, _ in json.loads((DATA / f"chatml/{name}.json").read_text()):
            whole = {"max_tokens": 9, **body} if name == "messages" else body
            cases.append([body, rendered(url, path, whole)])
        lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
        (folder / f"{name}.json").write_text(f"[\n{lines}\n]\n")
    lines = ",\n".join(json.dumps(rendered(url, path, body)) for path, body in agents())
    (folder / "agents.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
