"""tau2: tasks from its files, and its tools in workers on its databases; here a shop with one order, in the same form."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.env import EpisodeEnd
from agentrl.errors import ConfigError
from agentrl_envs.data_packages import INSPECT_EVALS
from agentrl_envs.tau2.environment import Tau2Environment
from agentrl_envs.tau2.tasks import tau2_tasks
from tests.support.wheels import hide_packages, install

DATA = "inspect_evals/tau2/data/domains"
TASKS = [
    {
        "id": str(number),
        "user_scenario": {
            "instructions": {"reason_for_call": "Cancel #1.", "known_info": "I am Ann.", "unknown_info": None}
        },
        "initial_state": None,
        "evaluation_criteria": {"actions": actions, "communicate_info": said},
    }
    for number, actions, said in (
        (0, [{"name": "cancel_order", "arguments": {"order_id": "#1", "reason": "mistake"}}], ["1,000"]),
        (1, [], []),
    )
]
AGENT_TOOLS = """
from inspect_ai.tool import ToolError
from inspect_ai.util import StoreModel
from pydantic import Field
from inspect_evals.tau2.retail.data_model import RetailDB


class RetailAgentTools(StoreModel):
    db: RetailDB = Field(default_factory=RetailDB)
    initialized: bool = False

    def cancel_order(self, order_id: str, reason: str) -> str:
        if order_id not in self.db.orders:
            raise ToolError("Order not found")
        self.db.orders[order_id] = f"cancelled: {reason}"
        return "cancelled"
"""
TOOLS = '''
from inspect_ai.tool import Tool, tool
from inspect_ai.util import store_as
from inspect_evals.tau2.retail.RetailAgentTools import RetailAgentTools


@tool
def cancel_order() -> Tool:
    async def execute(order_id: str, reason: str, times: int = 1) -> str:
        """Cancel an order.

        Args:
            order_id: The order, such as '#1'.
            reason: Why.
        """
        return store_as(RetailAgentTools, "RetailTools").cancel_order(order_id, reason)

    return execute


all_retail_tools = [cancel_order]
'''
MODEL = """
import hashlib
from pydantic import BaseModel


class RetailDB(BaseModel):
    orders: dict[str, str] = {}

    def get_hash(self):
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()
"""
UTILS = """
from pathlib import Path
import toml
from inspect_ai.model import Content

TAU2_DATA_DIR = Path(__file__).parent / "data"


def deep_equal_unordered(a, b):
    return a == b
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {
        f"{DATA}/retail/tasks.json": json.dumps(TASKS),
        f"{DATA}/retail/split_tasks.json": json.dumps({"base": ["0", "1"], "train": ["0"], "test": ["1"]}),
        f"{DATA}/retail/policy.txt": "Be kind.",
        "inspect_evals/tau2/utils.py": UTILS,
        "inspect_evals/tau2/retail/__init__.py": "raise RuntimeError('entered')",
        "inspect_evals/tau2/retail/data_model.py": MODEL,
        "inspect_evals/tau2/retail/tools.py": TOOLS,
        "inspect_evals/tau2/retail/RetailAgentTools.py": AGENT_TOOLS,
    }
    install(tmp_path, INSPECT_EVALS, files)
    (tmp_path / DATA / "retail" / "db.json.gz").write_bytes(gzip.compress(b'{"orders": {"#1": "pending", "#2": "pending"}}'))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for the workers
    return tmp_path


def reply(text: str = "", name: str = "", arguments: object = None) -> dict[str, Any]:
    if not name:
        return {"role": "assistant", "content": text}
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": text, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def test_tasks_have_the_case_of_the_customer_and_a_reference(package: Path) -> None:
    tasks = tau2_tasks("retail")
    assert [task.id for task in tasks] == ["retail-0", "retail-1"]
    assert tasks[0]["question"] == "Cancel #1.\n\nI am Ann."
    assert tasks[0]["reference"] == [
        '<tool_call>{"name": "cancel_order", "arguments": {"order_id": "#1", "reason": "mistake"}}</tool_call>',
        "Done. 1,000",
    ]
    assert tasks[0]["criteria"]["reward_basis"] == ["DB", "COMMUNICATE"]
    assert [task.id for task in tau2_tasks("retail", split="test")] == ["retail-1"]


def test_unknown_domains_and_splits_are_refused_by_name(package: Path) -> None:
    with pytest.raises(ConfigError, match=r"no domain 'hotel'; there is retail, airline, telecom, banking"):
        tau2_tasks("hotel")
    with pytest.raises(ConfigError, match=r"retail has no split 'dev'; there is base, train, test"):
        tau2_tasks("retail", split="dev")


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_packages(monkeypatch)
    with pytest.raises(ConfigError, match=r"run `pip install --no-deps inspect-evals==0.28.0`"):
        Tau2Environment()


@pytest.mark.starts
async def test_the_database_and_what_is_said_make_the_reward(package: Path) -> None:
    environment = Tau2Environment(num_workers=1)
    task, nothing = tau2_tasks("retail")
    cancel = {"order_id": "#1", "reason": "mistake"}

    start = await environment.reset(task, seed=0)
    assert [message["role"] for message in start.messages] == ["system", "user"]
    assert "Be kind." in str(start.messages[0]["content"])
    schema: Any = start.tools[0]["function"]
    assert (schema["name"], schema["description"]) == ("cancel_order", "Cancel an order.")
    assert schema["parameters"]["required"] == ["order_id", "reason"]
    assert schema["parameters"]["properties"]["reason"]["description"] == "Why."

    for arguments, text in (
        ({"order_id": "#9", "reason": "x"}, "Error: Order not found"),
        ({"order_id": "#1"}, "Error: argument reason: Field required"),
        ({**cancel, "more": 1}, "Error: argument more: Extra inputs are not permitted"),
        (cancel, "cancelled"),
    ):
        step = await environment.step(reply("", "cancel_order", arguments))
        assert step.messages[0]["content"] == text
    assert (await environment.step(reply("", "fly", {}))).messages[0]["content"] == "Error: there is no tool 'fly'"
    step = await environment.step(reply("You get 1,000 back."))
    assert (step.reward, step.end) == (1.0, EpisodeEnd.TERMINATED)

    for spoken, expected in (("It is 1000.", 1.0), ("nothing", 0.0)):
        await environment.reset(task, seed=0)
        await environment.step(reply("", "cancel_order", cancel))
        assert (await environment.step(reply(spoken))).reward == expected

    await environment.reset(nothing, seed=0)
    assert (await environment.step(reply("I cannot do that."))).reward == 1.0
    await environment.reset(nothing, seed=0)
    assert (await environment.step(reply())).reward == 0.0
    await environment.reset(nothing, seed=0)
    await environment.step(reply("", "cancel_order", cancel))
    assert (await environment.step(reply("Done."))).reward == 0.0


@pytest.mark.nightly
@pytest.mark.external
@pytest.mark.starts
@pytest.mark.parametrize(("domain", "count"), [("retail", 114), ("airline", 50), ("telecom", 114), ("banking", 97)])
async def test_the_reference_actions_of_every_task_are_right(domain: str, count: int) -> None:
    pytest.importorskip("inspect_evals")
    environment = Tau2Environment(num_workers=1)
    tasks = tau2_tasks(domain)
    assert len(tasks) == count
    wrong: list[str] = []
    for task in tasks:
        await environment.reset(task, seed=0)
        made = [json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>")) for text in task["reference"][:-1]]
        calls = [reply("", call["name"], call["arguments"])["tool_calls"][0] for call in made]
        if calls:
            await environment.step({"role": "assistant", "content": "", "tool_calls": calls})
        step = await environment.step(reply(task["reference"][-1]))
        if step.reward != 1.0:
            wrong.append(task.id)
    assert wrong == []
