"""The address of an episode for programs that speak a model API over HTTP.

Invariant: the key opens the model of one episode, while its door is open, and nothing else. It sets no reward: whatever runs
the commands of a model holds it. Rewards have a secret of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, StringConstraints, model_validator

from agentrl.config.base import Config
from agentrl.errors import WorkflowError

RoleName: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class OtherModel(Config):
    """A model of an OpenAI-compatible endpoint that answers side calls, and `/embeddings` and `/completions`."""

    base_url: str
    """Its base URL, such as `http://127.0.0.1:8000/v1`."""
    model: str
    """Its name there."""
    embeddings: str | None = None
    """The name of the endpoint's model for embeddings; None: `model`."""
    api_key_env: str | None = None
    """Environment variable with the endpoint's key; None: it needs none."""


class SideCalls(Config):
    """The rule for calls that a program makes beside those of its agent, such as titles: each of the lists finds some.

    With another model as `answer`, and no lists, it is for `/embeddings` and `/completions` alone.
    """

    models: tuple[str, ...] = ()
    """Model names of such calls; `*` stands for any characters, as in `*haiku*`."""
    roles: tuple[str, ...] = ()
    """Their roles, such as `title` and `compaction`."""
    prompts: tuple[str, ...] = ()
    """Text in the first message of such a call."""
    answer: Literal["policy"] | OtherModel = "policy"
    """The model that answers."""
    train: bool = False
    """Whether answers of the policy are trained; those of another model never are."""

    @model_validator(mode="after")
    def _check_rule(self) -> Self:
        if not (self.models or self.roles or self.prompts) and self.answer == "policy":
            raise ValueError("side_calls names no call; set models, roles or prompts, or an endpoint as `answer`")
        if self.train and self.answer != "policy":
            raise ValueError("side_calls.train needs answers of the policy; another model's are not trained")
        return self

    def is_one(self, *, model: str | None, role: str, prompt: str) -> bool:
        """Return whether a call is a side call.

        Example:
            >>> SideCalls(models=("*haiku*",)).is_one(model="claude-haiku-4-5", role="", prompt="")
            True
        """
        return (
            (model is not None and any(fnmatchcase(model, each) for each in self.models))
            or role in self.roles
            or any(each in prompt for each in self.prompts)
        )


class RoleRule(Config):
    """The calls of a role, of a program that does not mark which of its agents calls."""

    prompts: tuple[str, ...] = Field(min_length=1)
    """Text in the first message of such a call."""


class DoorSettings(Config):
    """Options of a door."""

    branches: tuple[str, ...] = ()
    """Roles whose agents are independent branches, as `Client.branch` declares; each agent of such a role is one."""
    roles: Mapping[RoleName, RoleRule] = Field(default_factory=dict[str, RoleRule])
    """Roles of calls that say none, by name: the first one whose rule finds the call."""
    images: Literal["refuse", "omit"] = "refuse"
    """A call with an image or a file, which a policy cannot read, is refused, or a short text takes its place (`omit`)."""
    side_calls: SideCalls | None = None
    """None: every call is one of the agent's own."""
    rewards: Literal["none", "turns", "all"] = "all"
    """The rewards that the reward URL of the door takes: of single answers (`turns`), the final one, too (`all`), or `none`.
    Give the URL only to programs that run no command of the model."""
    no_call: Literal["fail", "allow"] = "fail"
    """An episode whose program ends without a call of the policy is a failure, or what its reward says (`allow`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """An open door: any client of a model API that is given it plays the policy of one episode."""

    server_url: str
    """The server of this process, such as `http://127.0.0.1:40123`; without a path it takes `key` as the API key."""
    key: str
    """The secret by which programs sample; it sets no reward."""
    reward_key: str | None = field(default=None, repr=False)
    """The secret by which rewards are set; None: the door takes none."""

    @property
    def url(self) -> str:
        """The address of the episode; clients of Anthropic's API take it as their base URL."""
        return f"{self.server_url}/e/{self.key}"

    @property
    def base_url(self) -> str:
        """The base URL for clients of OpenAI's API; the API key that they send beside it is not read."""
        return f"{self.url}/v1"

    @property
    def reward_url(self) -> str:
        """The address that takes `{"reward": 1.0}`, or with `"response_id"` the reward of one answer.

        Whoever has it rewards: keep it from programs that run commands of the model.

        Raises:
            WorkflowError: the door takes no rewards.
        """
        if self.reward_key is None:
            raise WorkflowError("this door takes no rewards over HTTP; open it with `DoorSettings(rewards=...)`")
        return f"{self.server_url}/e/{self.reward_key}/reward"

    def environment(self, *, with_rewards: bool = False) -> dict[str, str]:
        """Return the variables by which unmodified clients find the episode; `AGENTRL_REWARD_URL` only `with_rewards`."""
        found = {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,  # alone: some clients refuse a token beside it
            # openai-agents sends its traces to a fixed public host, whatever the base URL is.
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }
        return {**found, "AGENTRL_REWARD_URL": self.reward_url} if with_rewards else found
