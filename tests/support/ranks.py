"""Functions that run on several trainer ranks at once, in processes forked from one that has torch imported."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from agentrl.trainer.parallel.ranks import Ranks, joined
from agentrl.trainer.parallel.shape import MeshShape

P = ParamSpec("P")
R = TypeVar("R")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["agentrl.trainer.policy", "tests.trainer.helpers", "tests.support.ranks"])
_TIMEOUT_S = 120.0


def on_ranks(
    world: int | MeshShape, function: Callable[Concatenate[Ranks, P], R], *args: P.args, **kwargs: P.kwargs
) -> list[R]:
    """Return what `function(ranks, ...)` returns on each rank; a number is the ways of dp.

    The function and its results are module-level.
    """
    shape = world if isinstance(world, MeshShape) else MeshShape(dp=world)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [_context.Pipe(duplex=False) for _ in range(shape.world)]
        ranks = [
            _context.Process(target=_rank, args=(rank, shape, store, sender, function, args, kwargs), daemon=True)
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process, (_, sender) in zip(ranks, pipes, strict=True):
            process.start()
            sender.close()
        try:
            results: list[R] = []
            for rank, (receiver, _) in enumerate(pipes):
                assert receiver.poll(_TIMEOUT_S), f"rank {rank} did not answer within {_TIMEOUT_S:g} s"
                results.append(receiver.recv())
            return results
        finally:
            for process in ranks:
                process.join(5)
                process.kill()


def _rank(
    rank: int,
    shape: MeshShape,
    store: str,
    sender: Connection,
    function: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    file = dist.FileStore(store, shape.world)
    with joined(file, rank, shape, device=torch.device("cpu"), timeout_s=60) as ranks:
        sender.send(function(ranks, *args, **kwargs))
