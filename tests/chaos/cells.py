"""The fault matrix: which fault strikes in which phase, and how the run ends.

Invariant: a fault names what is struck, so that a message can be judged by whether it names the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from tests.chaos.phases import PHASES, Phase
from tests.chaos.proxy import Mode

Ending: TypeAlias = Literal["continues", "ends with an error", "is killed"]
"""`continues`: the command reaches its last step, status 0. Otherwise `--resume` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault; exactly one of `signal`, `disk` and `proxy` is set."""

    name: str
    target: Literal["trainer", "server", "rollout worker", "driver", "child", "disk"]
    servers: int = 1
    workers: int = 0
    """Processes that play episodes; 0: the driver does."""
    ranks: int = 1
    """Processes of the trainer."""
    rank: int = 0
    """Which of them is struck."""
    signal: Literal["SIGKILL", "SIGSTOP"] | None = None
    disk: Literal["full", "read-only"] | None = None
    proxy: Mode | None = None
    ending: Ending
    names: str | None = None
    """Regular expression of the words by which a message names the fault; None: nothing in the run can name it."""
    heals_after_s: float | None = None
    """Seconds after which the fault ends by itself."""
    phases: tuple[Phase, ...] = PHASES


@dataclass(frozen=True, slots=True)
class Cell:
    """A fault in a phase."""

    fault: Fault
    phase: Phase

    @property
    def name(self) -> str:
        """A file name."""
        return f"{self.fault.name}, {self.phase}".replace(" ", "_").replace(",", "").replace("'", "")


_SERVER = r"127\.0\.0\.1:\d+|server"
FAULTS = (
    Fault(name="trainer killed", target="trainer", signal="SIGKILL", ending="ends with an error", names="trainer"),
    Fault(
        name="trainer frozen for 20 s",
        target="trainer",
        signal="SIGSTOP",
        ending="continues",
        names="trainer",
        heals_after_s=20.0,
    ),
    *(
        Fault(
            name=f"rank {rank} of two frozen",
            target="trainer",
            ranks=2,
            rank=rank,
            signal="SIGSTOP",
            ending="ends with an error",
            names=rf"rank {rank} \(pid \d+\)",
            phases=("rollout", "step", "checkpoint"),
        )
        for rank in range(2)
    ),
    Fault(name="only server killed", target="server", signal="SIGKILL", ending="continues", names=_SERVER),
    Fault(name="only server frozen", target="server", signal="SIGSTOP", ending="continues", names=_SERVER),
    Fault(name="one of two servers killed", target="server", servers=2, signal="SIGKILL", ending="continues", names=_SERVER),
    Fault(name="one of two servers frozen", target="server", servers=2, signal="SIGSTOP", ending="continues", names=_SERVER),
    Fault(
        name="one of two rollout workers frozen",
        target="rollout worker",
        workers=2,
        signal="SIGSTOP",
        ending="continues",
        names=r"rollout worker \d",
        phases=("step",),  # an episode in a worker cannot announce itself
    ),
    Fault(name="driver killed", target="driver", signal="SIGKILL", ending="is killed"),
    Fault(
        name="driver frozen for 5 s",
        target="driver",
        signal="SIGSTOP",
        ending="continues",
        heals_after_s=5.0,
        phases=("rollout", "publication"),
    ),
    Fault(
        name="workflow's child killed",
        target="child",
        signal="SIGKILL",
        ending="continues",
        phases=("rollout", "evaluation"),
    ),
    Fault(
        name="workflow's child frozen",
        target="child",
        signal="SIGSTOP",
        ending="continues",
        phases=("rollout", "evaluation"),
    ),
    Fault(
        name="disk full",
        target="disk",
        disk="full",
        ending="ends with an error",
        names="No space left",
        phases=("rollout", "publication", "checkpoint"),
    ),
    Fault(
        name="directory read-only",
        target="disk",
        disk="read-only",
        ending="ends with an error",
        names="Read-only",
        phases=("rollout", "publication", "checkpoint"),
    ),
    Fault(name="attached server slow", target="server", proxy="slow", ending="continues", heals_after_s=8.0),
    Fault(name="attached server wrong", target="server", proxy="wrong", ending="ends with an error", names=_SERVER),
    Fault(name="attached server silent", target="server", proxy="silent", ending="ends with an error", names=_SERVER),
    Fault(name="attached server cut off", target="server", proxy="partition", ending="ends with an error", names=_SERVER),
)
CELLS = tuple(Cell(fault, phase) for fault in FAULTS for phase in fault.phases)
SHORT = frozenset(
    {
        "trainer_killed_step",
        "rank_0_of_two_frozen_rollout",
        "only_server_killed_publication",
        "one_of_two_servers_frozen_rollout",
        "driver_killed_checkpoint",
        "workflows_child_killed_rollout",
        "disk_full_checkpoint",
        "directory_read-only_rollout",
        "attached_server_cut_off_evaluation",
    }
)
"""Cells of the short form."""
