"""The rank of a process, from the environment variables of the scheduler that started it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from agentrl.errors import ConfigError


class RankNumbers(NamedTuple):
    """The place of a process among those of its trainer."""

    rank: int
    world: int
    local: int
    """Its number among those of its machine."""


_SOURCES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("a Kubernetes indexed job", "JOB_COMPLETION_INDEX", "WORLD_SIZE", None),
    ("LeaderWorkerSet", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", None),
    ("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", None),
)
"""Each with its variables of the rank, the number of ranks, and the number on the machine; the first that is set counts."""


def numbers_in(environment: Mapping[str, str]) -> RankNumbers:
    """Return the numbers that torchrun, Slurm, Kubernetes, LeaderWorkerSet or SkyPilot set, the first of these.

    Raises:
        ConfigError: none is set, or one is no number.

    Example:
        >>> numbers_in({"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"})
        RankNumbers(rank=9, world=16, local=1)
    """
    for source, rank, world, local in _SOURCES:
        if rank in environment and world in environment:
            values = [environment[rank], environment[world], environment.get(local, "0") if local else "0"]
            if not all(value.isdecimal() for value in values) or int(values[0]) >= int(values[1]):
                raise ConfigError(
                    f"{source} gave {rank}={values[0]} and {world}={values[1]}: expected a rank below the number of ranks"
                )
            return RankNumbers(*map(int, values))
    raise ConfigError(f"which rank is this? No pair of environment variables says it; expected one of: {_pairs()}")


def world_in(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the scheduler of the ranks of a trainer, and their number, by the variables that `numbers_in` reads.

    Example:
        >>> world_in({"SLURM_NTASKS": "16"})
        ('Slurm', 16)
    """
    for source, _, world, _ in _SOURCES:
        if world in environment:
            if not environment[world].isdecimal() or int(environment[world]) < 1:
                raise ConfigError(f"{source} gave {world}={environment[world]}: expected the number of trainer ranks")
            return source, int(environment[world])
    raise ConfigError(
        "trainer.parallel.dp: auto under cluster.launcher: attach counts the ranks by WORLD_SIZE, and the driver has none "
        f"of the variables that say it ({_pairs()}); set WORLD_SIZE, or give dp a number"
    )


def _pairs() -> str:
    return "; ".join(f"{rank} and {world} ({source})" for source, rank, world, _ in _SOURCES)
