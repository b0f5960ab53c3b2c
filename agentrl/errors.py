"""Every error that agentrl raises, in one tree.

    AgentRLError
    ├── ConfigError (ValueError)              a config, flag or data file is wrong; nothing was started
    ├── WorkflowError (RuntimeError)          the user's workflow raised, or returned what is not a reward
    │   └── RewardError (ValueError)          a reward is not a finite number
    ├── EnvironmentFault (RuntimeError)       the environment or a tool backend broke; not the policy's fault
    │   └── RolloutWorkerDied                 the process that ran the episode ended; the episode runs again in another one
    ├── EpisodeLimit (RuntimeError)           a turn or token budget of the episode is spent
    ├── TokenError (ValueError)               text cannot be rendered or parsed into tokens exactly
    │   └── ContextOverflow                   the messages cannot fit into the context; they were not encoded
    ├── ServerError (ConnectionError)         an inference server could not do what was asked
    │   ├── ServerUnavailable                 refused, reset, or died mid-request
    │   ├── ServerTimeout (TimeoutError)      no answer within the deadline
    │   ├── RequestRejected (ValueError)      the server said the request is bad (HTTP 4xx)
    │   └── ReplyError (ValueError)           the reply breaks the protocol: short, mismatched or impossible arrays
    ├── ReplayDiverged (RuntimeError)         a replayed episode does something else than what was recorded
    ├── WeightSyncError (RuntimeError)        a weight update did not arrive, or is not what was sent
    │   └── UpdatePending                     the trainer is past the version asked for; the next update brings a newer one
    ├── TrainError (RuntimeError)             the trainer worker failed or its numbers are not finite
    │   └── TrainerDied                       the trainer worker died, or was late and killed; a run restarts it
    ├── LaunchError (RuntimeError)            a process of the run could not be started, or did not join
    ├── StaleDataError (RuntimeError)         a token over the staleness bound reached the trainer
    ├── InvariantError (RuntimeError)         recorded data contradicts itself; always stops the run
    └── RunStopped (RuntimeError)             the run cannot continue
        ├── ErrorBudgetExceeded               too many episodes failed; carries the first failure's traceback
        ├── NothingLearned                    too many steps in a row trained nothing; says why and what to change
        └── StallError (TimeoutError)         nothing moved within the deadline; names who waits for whom

Invariant: a failed *episode* is recorded as data (`WorkflowError`, `EnvironmentFault`, `EpisodeLimit`, `TokenError`,
`ServerError` and `ReplayDiverged` end an episode); `InvariantError`, `StaleDataError`, `WeightSyncError`, `TrainError` and
`RunStopped` end the run.
A message says what was expected, what was got, where, and what to do.
"""

from __future__ import annotations

import sys
from asyncio import CancelledError


class AgentRLError(Exception):
    """Base of every error that agentrl raises on purpose."""


class ConfigError(AgentRLError, ValueError):
    """A config value, command-line flag or data file is wrong; raised before anything starts."""


class WorkflowError(AgentRLError, RuntimeError):
    """The user's workflow raised, or returned something that is not a reward."""


class RewardError(WorkflowError, ValueError):
    """A reward is not a finite real number."""


class EnvironmentFault(AgentRLError, RuntimeError):
    """The environment or a tool backend broke, through no fault of the policy."""


class RolloutWorkerDied(EnvironmentFault):
    """The process that ran an episode ended before the episode did."""


class EpisodeLimit(AgentRLError, RuntimeError):
    """A turn or token budget of the episode is spent; the next model call is refused."""


class TokenError(AgentRLError, ValueError):
    """Text cannot be rendered into, or parsed out of, tokens exactly."""


class ContextOverflow(TokenError):
    """The messages of a request cannot fit into the model's context, whatever their tokens are; they were not encoded."""


class ReplayDiverged(AgentRLError, RuntimeError):
    """A replayed episode does something else than what was recorded, so there is no answer to give it."""


class ServerError(AgentRLError, ConnectionError):
    """An inference server could not do what was asked.

    Attributes:
        status: HTTP status of the reply, or None when there was none.
        url: the server's base URL, or None when no single server is to blame.
        retry_after_s: seconds after which the server asked to be called again, or None when it did not.
    """

    retry_after_s: float | None = None

    def __init__(self, message: str, *, status: int | None = None, url: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.url = url

    def __reduce__(self) -> tuple[object, tuple[type[ServerError], str, int | None, str | None]]:
        return _rebuild_server_error, (type(self), str(self), self.status, self.url)


class ServerUnavailable(ServerError):
    """The server refused the connection, reset it, died during the request, or is overloaded (HTTP 429, 5xx)."""


class ServerTimeout(ServerError, TimeoutError):
    """The server gave no answer within the deadline.

    Attributes:
        is_recorded: whether what the call had sampled is a turn of its episode, so that the call has not failed.
    """

    is_recorded: bool = False


class RequestRejected(ServerError, ValueError):
    """The server answered that the request itself is bad (HTTP 4xx but 429); sending it again cannot help."""


class ReplyError(ServerError, ValueError):
    """The server's reply breaks the protocol: short, mismatched or impossible arrays."""


class WeightSyncError(AgentRLError, RuntimeError):
    """A weight update did not arrive at a server, or the server's weights are not the ones sent."""


class UpdatePending(WeightSyncError):
    """The trainer's memory no longer holds the version asked for; the next weight update brings a newer one."""


class TrainError(AgentRLError, RuntimeError):
    """The trainer worker failed, died, or produced numbers that are not finite."""


class TrainerDied(TrainError):
    """The trainer worker is gone: it died, or was killed because it was late."""


class LaunchError(AgentRLError, RuntimeError):
    """A process of the run could not be started on its node, or did not join the driver in time."""


class StaleDataError(AgentRLError, RuntimeError):
    """A token older than the staleness bound allows was about to be trained."""


class InvariantError(AgentRLError, RuntimeError):
    """Recorded data contradicts itself (lengths, versions, digests, masks); the run must stop."""


class RunStopped(AgentRLError, RuntimeError):
    """The run cannot continue."""


class ErrorBudgetExceeded(RunStopped):
    """Too many episodes failed; the message carries the first failure's traceback."""


class NothingLearned(RunStopped):
    """Too many steps in a row left the weights as they were; the message says why and what to change."""


class StallError(RunStopped, TimeoutError):
    """Nothing moved within the deadline; the message names who waits for whom."""


def _rebuild_server_error(kind: type[ServerError], message: str, status: int | None, url: str | None) -> ServerError:
    return kind(message, status=status, url=url)


def error_named(kind: str, message: str) -> AgentRLError | None:
    """Return an error that another process names by its class; None if `kind` is no error of agentrl.

    Example:
        >>> error_named("TokenError", "no end of turn"), error_named("SystemExit", "0")
        (TokenError('no end of turn'), None)
    """
    found = globals().get(kind)
    return found(message) if isinstance(found, type) and issubclass(found, AgentRLError) else None


def is_cancellation(error: BaseException) -> bool:
    """Return whether an exception is the cancellation of asyncio or trio; works in any thread."""
    trio = sys.modules.get("trio")  # only a program that runs trio can be cancelled by it
    return isinstance(error, CancelledError) or (trio is not None and isinstance(error, trio.Cancelled))
