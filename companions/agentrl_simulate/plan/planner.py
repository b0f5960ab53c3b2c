"""The planner of splits that `agentrl.plan` finds by the entry point `agentrl.splits`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from agentrl.config import RunConfig
from agentrl.plan.model import ModelFacts
from agentrl.plan.splits import ResolvedRun
from agentrl_simulate.plan.basis import local_gpu
from agentrl_simulate.plan.moves import advise_move
from agentrl_simulate.plan.split import resolve_run


class FormulaPlanner:
    """Chooses splits by the formula of `agentrl_simulate.split`; see `SplitPlanner`."""

    def local_gpu(self, root: Path) -> str | None:
        return local_gpu(root)

    def resolve_run(self, run: RunConfig, model: ModelFacts, root: Path, *, resumes: bool) -> ResolvedRun:
        return resolve_run(run, model, root, resumes=resumes)

    def advise_move(self, run: RunConfig, model: ModelFacts) -> str | None:
        move = advise_move(run, model)
        return None if move is None else str(move)


FORMULA_PLANNER: Final = FormulaPlanner()
