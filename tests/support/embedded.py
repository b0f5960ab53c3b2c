"""What the tests of the embedded engine share: sinks that collect, requests, and HF models as references."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from agentrl.servers.embedded.engine import EmbeddedEngine, EngineOptions
from agentrl.servers.engine import EngineRequest, EngineSampling, RequestProgress


class Collector:
    """A sink that counts what it is told and lets a test wait for the end."""

    def __init__(self) -> None:
        self.finished = anyio.Event()
        self.finishes = 0
        self.progress_calls = 0
        self.lengths: list[int] = []
        self.result: RequestProgress | None = None
        self.started = anyio.Event()

    def progress(self, progress: RequestProgress) -> None:
        assert self.finishes == 0
        self.progress_calls += 1
        self.lengths.append(len(progress.output_ids))
        self.started.set()

    def finish(self, progress: RequestProgress) -> None:
        self.finishes += 1
        self.result = progress
        self.started.set()
        self.finished.set()

    async def wait(self) -> RequestProgress:
        with anyio.fail_after(300):
            await self.finished.wait()
        assert self.finishes == 1
        assert self.result is not None
        return self.result


def request(
    rid: str, ids: Sequence[int], sampling: EngineSampling, *, stream: bool = False, logprob_start_len: int = -1
) -> EngineRequest:
    return EngineRequest(rid=rid, input_ids=ids, sampling=sampling, stream=stream, logprob_start_len=logprob_start_len)


@asynccontextmanager
async def running(path: Path, **options: object) -> AsyncGenerator[EmbeddedEngine]:
    """Run an engine for the length of the block; on any machine it makes one step in a turn of the event loop."""
    engine = EmbeddedEngine(EngineOptions(model_path=str(path), turn_s=0, **options))  # pyright: ignore[reportArgumentType] - test options
    async with anyio.create_task_group() as group:
        group.start_soon(engine.run)
        yield engine
        group.cancel_scope.cancel()


async def generate(engine: EmbeddedEngine, *requests: EngineRequest) -> list[RequestProgress]:
    sinks = [Collector() for _ in requests]
    for one, sink in zip(requests, sinks, strict=True):
        engine.submit(one, sink)
    return [await sink.wait() for sink in sinks]


class ReferenceModel:
    """HF's own forward pass in float32."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.model.eval()

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        return self.model(torch.tensor([list(ids)])).logits[0]

    def logprobs(self, ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """Return [len(ids)] log-probs of each id given those before it; entry 0 is nan."""
        table = torch.log_softmax(self.logits(ids) / temperature, -1)
        picked = table[:-1].gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0]
        return np.concatenate(([np.nan], picked.numpy()))
