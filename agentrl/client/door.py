"""The address of an episode for programs that speak a model API over HTTP.

Invariant: the secret opens one episode, while its door is open, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """An open door: any client of a model API that is given it plays the policy of one episode."""

    server_url: str
    """The server of this process, such as `http://127.0.0.1:40123`; without a path it takes `key` as the API key."""
    key: str
    """The secret of the episode."""

    @property
    def url(self) -> str:
        """The address of the episode; clients of Anthropic's API take it as their base URL, and rewards go below it."""
        return f"{self.server_url}/e/{self.key}"

    @property
    def base_url(self) -> str:
        """The base URL for clients of OpenAI's API; the API key that they send beside it is not read."""
        return f"{self.url}/v1"

    @property
    def reward_url(self) -> str:
        """The address that takes `{"reward": 1.0}`, or with `"response_id"` the reward of one answer."""
        return f"{self.url}/reward"

    def environment(self) -> dict[str, str]:
        """Return the variables by which unmodified clients find the episode."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_AUTH_TOKEN": self.key,
            "AGENTRL_REWARD_URL": self.reward_url,
            # openai-agents sends its traces to a fixed public host, whatever the base URL is.
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }
