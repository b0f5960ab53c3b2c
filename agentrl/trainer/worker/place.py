"""Which of a trainer's processes one is, as its command line gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from agentrl.errors import ConfigError, InvariantError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The place of a process among those of its trainer.

    Example:
        >>> RankPlace.parse(RankPlace(rank=1, world=2, store="/tmp/meeting").arguments())
        RankPlace(rank=1, world=2, store='/tmp/meeting')
    """

    rank: int = 0
    world: int = 1
    store: str = ""
    """File through which the processes find each other; empty for a process that is alone."""

    def arguments(self) -> list[str]:
        """Return the arguments that `parse` reads."""
        return [f"--rank={self.rank}", f"--world={self.world}", f"--store={self.store}"] if self.world > 1 else []

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Self:
        """Return the place that `arguments` give; without any the process is alone.

        Raises:
            InvariantError: they are not those of `arguments()`.
        """
        given: dict[str, str] = {}
        for argument in arguments:
            name, _, value = argument.removeprefix("--").partition("=")
            given[name] = value
        try:
            return cls(rank=int(given["rank"]), world=int(given["world"]), store=given["store"]) if given else cls()
        except (KeyError, ValueError) as error:
            raise InvariantError(f"a trainer process was started with {list(arguments)}: {error}") from error

    def device_of(self, device: torch.device) -> torch.device:
        """Return the device of this rank: with several processes on GPUs, that many after `device`, else `device`.

        Raises:
            ConfigError: a rank's GPU does not exist; every rank raises it, so that none waits for another.
        """
        import torch

        if device.type != "cuda" or self.world == 1:
            return device
        first, count = device.index or 0, torch.cuda.device_count()
        if first + self.world > count:
            raise ConfigError(
                f"trainer.parallel: {self.world} GPUs from cuda:{first} are needed, this machine has {count}; lower dp"
            )
        return torch.device("cuda", first + self.rank)
