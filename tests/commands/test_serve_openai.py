"""`agentrl serve` answers the OpenAI API where the checkpoint has a chat template; `agentrl eval --endpoint` works on it."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.cli import AGENTRL, agentrl, ended, read_until, started, write_run
from tests.support.servers import call


@pytest.mark.starts
def test_agentrl_eval_works_at_a_served_checkpoint(tmp_path: Path, checkpoint: Path) -> None:
    write_run(tmp_path, checkpoint)
    command = (AGENTRL, "serve", str(checkpoint), "--port", "0", "--device", "cpu", "--served-model-name", "mine")
    with started(tmp_path, *command) as server:
        said = read_until(server, "Ctrl-C ends it")
        url = said.split("OpenAI API at ")[1].split()[0]
        options = ("--episodes", "4", "--greedy", "--output", "report.json")
        result = agentrl(tmp_path, "eval", "run.yaml", "--endpoint", url, "--model", "mine", *options)
        lengths: list[int] = []
        for number in range(4):
            messages = [{"role": "user", "content": f"Say {number}."}]
            body = {"model": "mine", "messages": messages, "temperature": 0, "max_tokens": 8}
            lengths.append(len(call(url, "/chat/completions", body).body["choices"][0]["message"]["content"]))
        ended(server, [signal.SIGINT])
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["episodes"], report["failed"]) == (4, 0)
    assert report["return_mean"] == pytest.approx(sum(lengths) / 400)


@pytest.mark.starts
def test_a_checkpoint_without_a_chat_template_is_served_without_the_openai_api_in_the_type_of_the_flag(
    tmp_path: Path, checkpoint: Path
) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "model")
    (model / "tokenizer_config.json").unlink()
    (model / "chat_template.jinja").unlink(missing_ok=True)
    command = (AGENTRL, "serve", str(model), "--port", "0", "--device", "cpu", "--dtype", "bfloat16")
    with started(tmp_path, *command) as server:
        said = read_until(server, "Ctrl-C ends it")
        url = said.split(" at ")[-1].split()[0]
        assert call(url, "/server_info").body["dtype"] == "bfloat16"
        answer = call(url, "/v1/chat/completions", {"messages": []})
        ended(server, [signal.SIGINT])
    assert "warning: no OpenAI API: " in said
    assert answer.status == 404
    assert "there is GET /v1/loads" in answer.body["error"]["message"]
