"""What an OpenAI-compatible endpoint answers, judged: a whole completion, or an error that says what is wrong with it.

Invariant: text that was cut by anything but the model or a limit of the call never passes for an answer; whatever an
endpoint does wrong is a `ServerError` that names episode and endpoint, and is never blamed on the workflow.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from json import JSONDecodeError

import openai
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice

from agentrl.client.surface import CallTimeout
from agentrl.errors import ReplyError, RequestRejected, ServerError, ServerUnavailable

_CUT = frozenset({"abort", "content_filter", "error"})
"""What endpoints call an answer that neither the model nor a limit of the call has ended."""
_SAID = {"content", "refusal", "tool_calls", "function_call", "audio", "reasoning_content", "reasoning"}

_UNREADABLE = (AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a reply raises that has another shape."""


class Source:
    """Whom an episode asked, for what is wrong with the answer."""

    def __init__(self, episode_id: str, url: str) -> None:
        self._url = url
        self._where = f"episode {episode_id}, {url}"

    @contextmanager
    def errors(self) -> Generator[None, None, None]:
        """Turn what the openai client raises into the errors a workflow sees in training."""
        where, url = self._where, self._url
        try:
            yield
        except openai.APITimeoutError as error:
            raise CallTimeout(f"{where}: no answer within the call's timeout", url=url) from error
        except openai.APIConnectionError as error:
            raise ServerUnavailable(f"{where}: {error} ({error.__cause__!r})", url=url) from error
        except openai.APIStatusError as error:
            kind = RequestRejected if error.status_code < 500 and error.status_code != 429 else ServerUnavailable
            told = f"{where} answered {error.status_code}: {error.message}"
            raise kind(told, status=error.status_code, url=url) from error
        except openai.OpenAIError as error:
            raise ServerError(f"{where}: {error}", url=url) from error
        except JSONDecodeError as error:
            raise self.broken(f"what is not JSON: {error}") from error

    @contextmanager
    def reading(self, what: object) -> Generator[None, None, None]:
        """Turn what goes wrong in reading `what` into a `ReplyError` that shows it."""
        try:
            yield
        except _UNREADABLE as error:
            raise self.broken(f"{what!r:.200}") from error

    def broken(self, got: str) -> ReplyError:
        """Return the error for a reply that cannot be a turn."""
        return ReplyError(
            f"{self._where}: expected a chat completion with a finish_reason and with text, reasoning or a tool call, "
            f"got {got}. Nothing was recorded; call again, and if it comes back look into the endpoint's log",
            url=self._url,
        )

    def uncounted(self) -> ReplyError:
        """Return the error for a reply that does not say how much of a token budget it took."""
        return ReplyError(
            f"{self._where}: expected usage.completion_tokens in the reply, which rollout.max_episode_tokens is counted by; "
            "the endpoint reports no usage, so leave that budget out",
            url=self._url,
        )

    def choice(self, completion: ChatCompletion) -> Choice:
        """Return the first choice of a completion, checked: the openai client takes anything that is JSON.

        One that says nothing is whole where the endpoint counted sampled tokens: the model's own end of turn, hidden
        reasoning cut by `max_tokens`. In training those are turns, too.

        Raises:
            ReplyError: there is no choice, it was not finished by the model or a limit, or nothing was sampled.
        """
        with self.reading(completion):
            choice = completion.choices[0]
            said = choice.message.model_dump(include=_SAID, exclude_none=True, warnings=False)
        if not choice.finish_reason:
            raise self.broken(f"one that breaks off without a finish_reason: {said!r:.200}")
        if choice.finish_reason in _CUT:
            raise self.broken(f"one the endpoint cut, with finish_reason {choice.finish_reason!r}: {said!r:.200}")
        if not any(said.values()) and not counted(completion, "completion_tokens"):
            raise self.broken(f"an empty one, with finish_reason {choice.finish_reason!r}")
        return choice


def counted(completion: ChatCompletion, name: str) -> float | None:
    """Return a token count of the completion, None where the endpoint gives none."""
    count = getattr(completion.usage, name, None)
    return float(count) if isinstance(count, (int, float)) else None
