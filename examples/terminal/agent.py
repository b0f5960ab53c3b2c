"""A terminal agent as a program of its own, with nothing but the standard library: it runs inside the task's container.

Run it with `agentrl train examples/terminal/run.yaml --dry-run`. It asks `OPENAI_BASE_URL` for a command at a time, runs it
with bash, and shows the model the end of its output, until the model answers `DONE`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request

MAX_COMMANDS = 20
MAX_CHARS = 4_000
SYSTEM = "Answer with one bash command, without any other text. Answer DONE when the task is done."


def ask(messages: list[dict[str, str]]) -> str:
    """Return the model's answer."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=600) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def main() -> None:
    """Work on the instruction that is the first argument."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sys.argv[1]}]
    for _ in range(MAX_COMMANDS):
        answer = ask(messages)
        if answer.strip() == "DONE":
            return
        done = subprocess.run(["bash", "-c", answer], capture_output=True, text=True, timeout=60, check=False)
        output = (done.stdout + done.stderr)[-MAX_CHARS:] or f"exit status {done.returncode}"
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": output}]


if __name__ == "__main__":
    main()
