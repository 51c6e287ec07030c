"""Locust's own user of OpenAI's API, under load: with_locust.py URL MODEL"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = sys.argv[1:]
USERS = f"""
from locust import constant, task
from locust.contrib.oai import OpenAIUser

class User(OpenAIUser):
    wait_time = constant(0)

    @task
    def chat(self):
        with self.client.rename_request("chat"):
            self.client.chat.completions.create(
                model="{MODEL}",
                messages=[{{"role": "user", "content": "hello"}}],
                max_tokens=5,
            )
"""

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "users.py")
    file.write_text(USERS)
    command = [sys.executable, "-m", "locust", "-f", str(file), "--headless", "--only-summary"]
    done = subprocess.run(
        [*command, "-u", "4", "-r", "4", "-t", "5s"],
        env=os.environ | {"OPENAI_API_KEY": "any", "OPENAI_BASE_URL": f"{URL}/v1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
assert done.returncode == 0, done.stderr
lines = (done.stderr + done.stdout).splitlines()
rows = [line.split() for line in lines if line.split()[1:2] == ["chat"]]
assert int(rows[0][2]) > 0, rows
assert rows[0][3] == "0(0.00%)", rows
