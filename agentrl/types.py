"""The nouns of agentrl: task, turn, trajectory, group, sample. Plain frozen records, no I/O, no torch.

Invariant: a trajectory is a tree of turns, each holding only the tokens it adds. Joining the turns from the root to any
leaf gives exactly the ids the server saw and produced, in order; every token sampled is trained at most once.

The context of a model call: its token ids and their JSON, in pieces that the calls of a conversation share.

At 32k tokens they are 128 and 170 KiB. A call that goes on where another ended takes over its pieces and adds its own, so a
turn costs what is new; whoever sends or reads the whole joins it.

Invariant: the pieces of `json`, joined, are the ids, decimal and comma-joined; every id is at least 0 and below `bound`.

Frozen records at a lower price: array fields kept as bytes, and records written field by field.

A numpy array object takes 112 bytes beside its data, which is more than the data of a short turn. A packed field takes an
array, keeps its bytes, and gives a read-only array over them. Where many records are made, they are written `opened`.

Invariant: a packed field gives back exactly the values, in the declared type, that it was given; what was written `opened`
and closed is the record its class would make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MemberDescriptorType
from typing import Any, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from agentrl.errors import TokenError

Record = TypeVar("Record")


class PackedArray:
    """The descriptor that stands in the place of a slot."""

    def __init__(self, slot: MemberDescriptorType, dtype: type[np.generic]) -> None:
        """Keep values in `slot`, as bytes of `dtype`."""
        self.raw: Callable[[object], bytes] = slot.__get__
        """Returns the bytes of the array of a record."""
        self.put: Callable[[object, object], None] = slot.__set__
        """Sets the bytes of the array of a record, be it frozen or not."""
        self._dtype = np.dtype(dtype)
        self.__doc__ = slot.__doc__

    def __get__(self, record: object, owner: type | None = None) -> NDArray[Any] | PackedArray:
        return self if record is None else np.frombuffer(self.raw(record), self._dtype)

    def __set__(self, record: object, value: object) -> None:
        array = np.asarray(value, self._dtype)
        kept = cast("object", array.base)  # an array over whole bytes shares them
        self.put(record, kept if type(kept) is bytes and len(kept) == array.nbytes else array.tobytes())


def packed(**dtypes: type[np.generic]) -> Callable[[type[Record]], type[Record]]:
    """Return a decorator for a slotted dataclass that packs the named one-dimensional array fields."""

    def pack(record: type[Record]) -> type[Record]:
        for name, dtype in dtypes.items():
            setattr(record, name, PackedArray(record.__dict__[name], dtype))
        return record

    return pack


def opened(record: type) -> type[Any]:
    """Return a class with the slots of a frozen dataclass, but writable; its objects become records by their `__class__`.

    The `__init__` of a frozen dataclass finds out anew how to set each field, at six times the cost. Packed fields take
    bytes here, and no default is filled in: a field that is left out is an AttributeError when it is read.
    """
    return type(record.__name__, (), {"__slots__": vars(record)["__slots__"]})


JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
Int32Array: TypeAlias = NDArray[np.int32]
Float32Array: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
Message: TypeAlias = Mapping[str, Any]
"""One chat message as the OpenAI wire writes it: `role`, `content`, `tool_calls`, `tool_call_id`, ..."""


class StopReason(StrEnum):
    """Why a turn or an episode ended."""

    STOP = "stop"
    """Turn: the model ended it (end-of-turn token or a stop string)."""
    LENGTH = "length"
    """Turn: the token limit of the call was reached; the output is truncated."""
    ABORT = "abort"
    """Turn: the server ended it early; the output is partial."""
    COMPLETED = "completed"
    """Episode: the workflow returned a reward."""
    TURN_LIMIT = "turn_limit"
    """Episode: the turn budget was spent before the workflow returned."""
    TOKEN_LIMIT = "token_limit"
    """Episode: the token budget was spent before the workflow returned."""
    DEADLINE = "deadline"
    """Episode: the wall-clock deadline passed."""
    WORKFLOW_ERROR = "workflow_error"
    """Episode: the workflow raised or returned what is not a reward."""
    ENVIRONMENT_FAULT = "environment_fault"
    """Episode: the environment or a tool backend broke."""
    SERVER_ERROR = "server_error"
    """Episode: no inference server could answer."""


class ForkReason(StrEnum):
    """Why a request did not extend the turn the episode would be expected to extend."""

    HISTORY_EDITED = "history_edited"
    """A message that the server has seen was changed, removed or inserted."""
    THINKING_STRIPPED = "thinking_stripped"
    """The chat template (history: as_template) drops earlier reasoning."""
    TOOLS_CHANGED = "tools_changed"
    """The list of tools differs from the one the parent turn was rendered with."""
    TEMPLATE_CHANGED = "template_changed"
    """The template's own text for known messages differs from what was recorded (system text, template options)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem instance with its metadata; `task["question"]` reads a field.

    Example:
        >>> task = Task(id="7", data={"question": "2 + 2 = ?", "answer": "4"})
        >>> task["answer"]
        '4'
    """

    id: str
    """Unique within its task set."""
    data: Mapping[str, Any]
    """The fields of the task, as its author wrote them."""

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - a task's fields are the user's own JSON
        """Return a field; a missing one names the fields there are."""
        try:
            return self.data[key]
        except KeyError:
            raise KeyError(f"task {self.id!r} has no field {key!r}; it has {sorted(self.data)}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Output tokens `start` (inclusive) to `end` (exclusive) of one turn were sampled by `version`."""

    start: int
    end: int
    version: int


@packed(context_ids=np.int32, output_ids=np.int32, output_logprobs=np.float32)
@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call: the tokens it adds to its parent and what the server returned.

    Example:
        >>> turn = Turn(
        ...     context_ids=np.array([5, 6, 7], np.int32),
        ...     output_ids=np.array([8, 9], np.int32),
        ...     output_logprobs=np.array([-0.1, -0.2], np.float32),
        ...     spans=(VersionSpan(start=0, end=2, version=3),),
        ...     stop_reason=StopReason.STOP,
        ... )
        >>> turn.output_versions().tolist()
        [3, 3]
    """

    context_ids: Int32Array
    """[C] int32: tokens since the end of the parent turn (scaffold, user text, tool results); never trained."""
    output_ids: Int32Array
    """[T] int32: the ids the model sampled, exactly."""
    output_logprobs: Float32Array
    """[T] float32, nats: log-prob of each output id under the weights `spans` names, at `temperature`."""
    spans: tuple[VersionSpan, ...]
    """Policy versions of the output tokens; contiguous from 0 to T, versions non-decreasing."""
    stop_reason: StopReason
    reward: float | None = None
    """The turn's own reward; None where the workflow set none."""
    parent: int | None = None
    """Index of the parent turn in `Trajectory.turns`; None for a root."""
    message: Message = field(default_factory=dict[str, Any])
    """The assistant message the output decoded to."""
    temperature: float = 1.0
    """Sampling temperature of the call; 0 means greedy, whose tokens have no policy gradient and are not trained."""
    fork: ForkReason | None = None
    """Set when the request did not extend the latest turn of the conversation it belongs to."""
    kept_thinking: bool = False
    """Whether its context holds earlier reasoning that the chat template would have dropped (`history: keep`)."""
    prompt_digest: bytes = b""
    """16 bytes: digest of the decimal, comma-joined ids sent to the server for this call."""

    def output_versions(self) -> Int32Array:
        """Return the policy version of each output token, [T] int32."""
        versions = np.empty(len(self.output_ids), np.int32)
        for span in self.spans:
            versions[span.start : span.end] = span.version
        return versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A branch as training arrays, all of length L."""

    token_ids: Int32Array
    """[L] int32."""
    loss_mask: BoolArray
    """[L] bool, True at t where the prediction *of* token t, from the tokens before it, is trained."""
    behavior_logprobs: Float32Array
    """[L] float32, nats; 0 where not sampled."""
    token_versions: Int32Array
    """[L] int32: the policy version that sampled the token; -1 where not sampled."""
    turn_index: Int32Array
    """[L] int32: index into `Trajectory.turns`."""
    temperatures: Float32Array
    """[L] float32: sampling temperature; 1 where not sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFailure:
    """Why an episode has no usable result."""

    kind: str
    """Name of the error class."""
    message: str
    traceback: str
    """The formatted traceback, for the first report of an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The recorded tokens, log-probs, versions and rewards of one episode: a tree of turns.

    Example:
        >>> ids = lambda *xs: np.array(xs, np.int32)
        >>> first = Turn(context_ids=ids(1, 2), output_ids=ids(3), output_logprobs=np.array([-1.0], np.float32),
        ...              spans=(VersionSpan(start=0, end=1, version=0),), stop_reason=StopReason.STOP)
        >>> second = Turn(context_ids=ids(4), output_ids=ids(5), output_logprobs=np.array([-2.0], np.float32),
        ...               spans=(VersionSpan(start=0, end=1, version=1),), stop_reason=StopReason.STOP, parent=0)
        >>> trajectory = Trajectory(episode_id="e", task_id="t", turns=(first, second),
        ...                         stop_reason=StopReason.COMPLETED, final_reward=1.0)
        >>> [sample] = trajectory.branches()
        >>> sample.token_ids.tolist(), sample.loss_mask.tolist(), sample.token_versions.tolist()
        ([1, 2, 3, 4, 5], [False, False, True, False, True], [-1, -1, 0, -1, 1])
    """

    episode_id: str
    task_id: str
    turns: tuple[Turn, ...]
    """In order of completion; a parent stands before its children."""
    stop_reason: StopReason
    final_reward: float | None = None
    """What the workflow returned; credited to the whole episode. None for a failed episode."""
    failure: EpisodeFailure | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers the workflow recorded, such as `{"busy": 1.0}`."""

    @property
    def episode_return(self) -> float:
        """Sum of all turn rewards and the final reward, undiscounted."""
        return math.fsum(turn.reward or 0.0 for turn in self.turns) + (self.final_reward or 0.0)

    @property
    def num_output_tokens(self) -> int:
        """Tokens the model sampled in this episode."""
        return sum(len(turn.output_ids) for turn in self.turns)

    def leaves(self) -> list[int]:
        """Return the indices of turns without children, in order."""
        parents = {turn.parent for turn in self.turns}
        return [index for index in range(len(self.turns)) if index not in parents]

    def path(self, leaf: int) -> list[int]:
        """Return the turn indices from the root to `leaf`, both included."""
        path: list[int] = []
        index: int | None = leaf
        while index is not None:
            path.append(index)
            index = self.turns[index].parent
        return path[::-1]

    def branches(self) -> list[Sample]:
        """Return one sample for each leaf; a turn shared by several leaves is trained in the first of them only.

        Greedy turns (temperature 0) are never in the loss mask.
        """
        trained: set[int] = set()
        samples: list[Sample] = []
        for leaf in self.leaves():
            path = self.path(leaf)
            samples.append(self._sample(path, trained))
            trained.update(path)
        return samples

    def _sample(self, path: Sequence[int], trained: set[int]) -> Sample:
        length = sum(len(self.turns[i].context_ids) + len(self.turns[i].output_ids) for i in path)
        ids = np.empty(length, np.int32)
        mask = np.zeros(length, np.bool_)
        logprobs = np.zeros(length, np.float32)
        versions = np.full(length, -1, np.int32)
        turn_index = np.empty(length, np.int32)
        temperatures = np.ones(length, np.float32)
        at = 0
        for index in path:
            turn = self.turns[index]
            out = at + len(turn.context_ids)
            end = out + len(turn.output_ids)
            ids[at:out], ids[out:end] = turn.context_ids, turn.output_ids
            turn_index[at:end] = index
            logprobs[out:end] = turn.output_logprobs
            versions[out:end] = turn.output_versions()
            if turn.temperature > 0:
                mask[out:end] = index not in trained
                temperatures[out:end] = turn.temperature
            at = end
        return Sample(
            token_ids=ids,
            loss_mask=mask,
            behavior_logprobs=logprobs,
            token_versions=versions,
            turn_index=turn_index,
            temperatures=temperatures,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The episodes of one task, carried together from admission to the loss."""

    index: int
    """Admission number, from 0; unique within a run."""
    task: Task
    episodes: tuple[Trajectory, ...]
    admitted_version: int
    """Policy version when the group was opened; no token of it is older."""

    def min_version(self) -> int:
        """Return the oldest policy version among the sampled tokens (`admitted_version` if none was sampled)."""
        turns = (turn for episode in self.episodes for turn in episode.turns)
        return min((span.version for turn in turns for span in turn.spans), default=self.admitted_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Weights of one policy version, written where servers can read them."""

    version: int
    path: str
    """Directory of a HF-format checkpoint; complete when it is visible under this name."""
    checksum: str
    """Digest over all tensors; see `agentrl.weights.checksum`."""
    tensor_checksums: Mapping[str, str]
    """Digest of each tensor, by HF parameter name."""


INT32 = np.dtype(np.int32)


class Context(msgspec.Struct, frozen=True):
    """Token ids from the root of a conversation to where the model writes.

    Example:
        >>> context = Context.of([5, 6, 7])
        >>> context.size, context.ids().tolist(), context.json
        (3, [5, 6, 7], (b'5,6,7',))
    """

    packed: tuple[bytes, ...]
    """The ids, int32, in pieces."""
    json: tuple[bytes, ...]
    """The ids as they are sent, in pieces."""
    size: int
    """How many there are."""
    bound: int
    """All of them are below it: the size of the vocabulary they are from, or less."""

    @classmethod
    def of(cls, ids: Sequence[int] | Int32Array) -> Context:
        """Return the context of these ids.

        Raises:
            TokenError: if they are no list of whole numbers, or one is negative or no int32.
        """
        given = np.asarray(ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise TokenError(f"a context is a list of token ids, got an array of {given.dtype} with shape {given.shape}")
        low, high = (int(given.min()), int(given.max())) if given.size else (0, -1)
        if low < 0 or high >= 2**31:
            raise TokenError(f"token ids must be in 0..{2**31 - 1}, got {low}..{high}")
        packed = given.astype(INT32).tobytes()
        return cls((packed,), (json_of(packed),), given.size, high + 1)

    def ids(self) -> Int32Array:
        """Return all ids, [N] int32, read-only."""
        return np.frombuffer(b"".join(self.packed), INT32)


def json_of(packed: bytes) -> bytes:
    """Return int32 ids as JSON, without brackets."""
    return orjson.dumps(np.frombuffer(packed, INT32), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
