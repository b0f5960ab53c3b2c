"""A Hugging Face causal model as a function from tokens to log-probs, computed only where they are needed.

Invariant: the log-prob of a trained token is log_softmax(logits / temperature) of the model without dropout. It does not
depend on the other sequences of the forward pass, except by rounding. Weights and gradients are float32; in bfloat16, the
forward pass uses copies and is exactly that of a bfloat16 model, also where it is recomputed for the backward pass.

Legend: B sequences of a microbatch, T its longest length, n trained tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_outputs import BaseModelOutputWithPast

from agentrl.algo.prefixes import token_tree
from agentrl.errors import ConfigError, InvariantError
from agentrl.support.processor import multiplies_bfloat16_slowly
from agentrl.trainer.config import LoraConfig
from agentrl.trainer.loading import read_weights, set_for_training
from agentrl.trainer.lora import Adapter, choose_trained
from agentrl.trainer.parallel.ranks import Ranks, TrainerMesh, together
from agentrl.trainer.parallel.shape import check_tensor_fit
from agentrl.trainer.parallel.shard import as_forward, local_part, shard
from agentrl.trainer.parallel.snapshot import raw_tensor, snapshot
from agentrl.trainer.parallel.tensor import VocabularyPart, split_block, split_vocabulary, vocabulary_part
from agentrl.trainer.parallel.ulysses import SequenceCut, cut_sequences
from agentrl.trainer.precision import compute_in_bfloat16
from agentrl.trainer.shared import SharedRow, can_share_prefixes, share_prefixes, shared_row
from agentrl.types import BoolArray, Float32Array, Int32Array
from agentrl.weights.heads import head_is_last, logits_of
from agentrl.weights.model_files import model_tensors
from agentrl.weights.modules import conversions_of, empty_model, materialize, untie_different
from agentrl.weights.peft_files import (
    AdapterBase,
    base_digest,
    check_base,
    is_adapter,
    is_adapter_parameter,
    read_adapter_config,
)
from agentrl.weights.tensors import RawTensor, StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Sequences of one forward pass, a tree or padded on the right (no token attends to later ones), and wanted tokens."""

    input_ids: Tensor
    """[B, T] int64; 0 where padded."""
    positions: Tensor
    """[n] int64: index into B x T of the token *before* each wanted one."""
    targets: Tensor
    """[n] int64: the wanted tokens."""
    temperatures: Tensor | None
    """[n] float32: sampling temperature of each wanted token; None where all are 1."""
    logprobs: bool = True
    entropy: bool = False
    """Whether a forward pass computes entropies; they come with the log-probs."""
    values: bool = False
    """Whether it computes what the model's value head makes of the hidden states."""
    row: SharedRow | None = None
    """The tree that the tokens are, B = 1; None: sequences stand side by side."""
    num_tokens: int = 0
    """Tokens that a forward pass computes, padding not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """The result of a forward pass for the wanted tokens; None where it was not asked for."""

    logprobs: Tensor | None
    """[n] float32 nats."""
    entropy: Tensor | None
    """[n] float32 nats: of the whole distribution at the token's temperature."""
    values: Tensor | None
    """[n] float32: of the value head, before each wanted token."""


def resolve_device(name: str) -> torch.device:
    """Return the device that `name` means; `auto` is CUDA where there is a GPU.

    Raises:
        ConfigError: `name` is unknown or the device does not exist.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"trainer.device or sft.device: expected auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"trainer.device or sft.device: {name}, but there are {torch.cuda.device_count()} CUDA devices; use cpu or auto"
        )
    return device


class PolicyModel:
    """The trained model: float32 weights, copied for a bfloat16 pass, or an adapter on a frozen base."""

    def __init__(
        self,
        path: str | Path,
        *,
        device: torch.device,
        dtype: Literal["float32", "bfloat16"] = "float32",
        gradient_checkpointing: bool = False,
        max_logits: int = 1 << 27,
        ranks: Ranks | None = None,
        share: bool = False,
        lora: LoraConfig | None = None,
        trainable: str | None = None,
        seed: int = 0,
    ) -> None:
        """Load the HF checkpoint at `path` onto `device`.

        Args:
            path: local HF directory with safetensors weights.
            device: of the weights.
            dtype: of the forward and backward pass; the log-softmax is float32 in any case.
            gradient_checkpointing: recompute activations in the backward pass.
            max_logits: logits (n x V) that are made at once, 0.5 GiB by default; more are made in slices and recomputed.
            ranks: the processes over which the weights are split; None: this one holds them whole.
            share: let passes compute common prefixes once, where the architecture can; see `shares_prefixes`.
            lora: the adapter that is trained in place of the weights, which then take `dtype`; drawn from `seed`.
            trainable: pattern of the names of the weights that are trained; None: all.
            seed: of the adapter.
        """
        self.path, self.device = Path(path), device
        self.ranks = ranks or Ranks()
        self.module, stored = together(self.ranks, partial(_read_headers, self.path))
        self._conversions = conversions_of(self.module)
        self._head_is_last, self._module_logits = head_is_last(self.module), logits_of(self.module)
        self.vocab_size, self.hidden_size = map(int, self._head.get_parameter("weight").shape)
        self._max_logits = max_logits
        set_for_training(self.module, gradient_checkpointing=gradient_checkpointing)
        mesh = self.ranks.mesh(device)
        self.adapter: Adapter | None = None
        self._forward = self._token_rows
        self._cut: SequenceCut | None = None
        self.tensor_group: dist.ProcessGroup | None = None
        self._part: VocabularyPart | None = None
        self.value_head: Callable[[Tensor], Tensor] | None = None
        """Makes [n] float32 values of [n, D] hidden states; a critic puts it here."""
        self.shares_prefixes = share and (mesh is None or mesh.cp is None) and can_share_prefixes(self.module)
        """Whether a microbatch can be a tree."""
        blocks = None if mesh is None else self._split_layers(mesh)
        choose = partial(choose_trained, self.module, lora, trainable, mesh and mesh.tp, dtype=dtype, where=self.path)
        self.adapter = together(self.ranks, choose)
        if mesh is not None and blocks is not None:
            shard(self.module, blocks, mesh.weights, bfloat16=dtype == "bfloat16")
            self._forward = as_forward(self.module, "policy_rows", self._token_rows)
        elif dtype == "bfloat16":
            compute_in_bfloat16(self.module, widened=device.type == "cpu" and multiplies_bfloat16_slowly())
        materialize(self.module, device)
        together(self.ranks, partial(self.read, stored, self.path))
        if self.adapter is not None:
            self.adapter.begin(seed)
            self.base = self._adapter_base(stored)
        together(self.ranks, self._check_head)

    def _adapter_base(self, stored: Mapping[str, StoredTensor]) -> AdapterBase:
        digest = self.ranks.share(base_digest(stored).encode() if self.ranks.rank == 0 else None)
        return AdapterBase(str(self.path.absolute()), digest.decode())

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The tensors of the HF checkpoint by name; tied ones once."""
        every = dict(self.module.named_parameters())
        if self.adapter is None:
            return every
        return {name: tensor for name, tensor in every.items() if not is_adapter_parameter(name)}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The trained tensors by name: all of `parameters`, some of them, or the adapter's."""
        return {name: tensor for name, tensor in self.module.named_parameters() if tensor.requires_grad}

    @property
    def leaves_as_copies(self) -> bool:
        """Whether `weights` returns copies in any case."""
        return self.is_split or self.adapter is not None

    def vocabulary_parameters(self) -> frozenset[str]:
        """Return the names of the parameters with one row per token: embeddings and output head."""
        rows = {id(self.module.get_input_embeddings().get_parameter("weight")), id(self._head.get_parameter("weight"))}
        return frozenset(name for name, parameter in self.parameters.items() if id(parameter) in rows)

    def microbatch(
        self,
        sequences: Sequence[Int32Array],
        masks: Sequence[BoolArray],
        temperatures: Sequence[Float32Array] | None = None,
        *,
        logprobs: bool = True,
        entropy: bool = False,
        values: bool = False,
        share: bool = False,
    ) -> Microbatch:
        """Return `sequences`, [L] int32 each, as one forward pass; wanted are the tokens of the `masks`, [L] bool.

        They are padded, or with `share` a tree that computes common prefixes once. `temperatures` are [L] float32; None: 1.
        Raises InvariantError where a first token is wanted: nothing predicts it.
        """
        for number, mask in enumerate(masks):
            if len(mask) and mask[0]:
                raise InvariantError(f"sequence {number} asks for the log-prob of its first token, which nothing predicts")
        self.check_ids(sequences)
        tree = token_tree(sequences) if share else None
        rows, places = self._padded(sequences) if tree is None else (tree.token_ids[None].astype(np.int64), tree.places)
        before = [where[:-1][mask[1:]] for where, mask in zip(places, masks, strict=True)]
        wanted = None
        if temperatures is not None:
            sampled_at = np.concatenate([values[mask] for values, mask in zip(temperatures, masks, strict=True)])
            wanted = torch.from_numpy(sampled_at).to(self.device) if (sampled_at != 1).any() else None
        targets = np.concatenate([ids[mask] for ids, mask in zip(sequences, masks, strict=True)])
        return Microbatch(
            input_ids=torch.from_numpy(rows).to(self.device),
            positions=torch.from_numpy(np.concatenate(before)).to(self.device),
            targets=torch.from_numpy(targets.astype(np.int64)).to(self.device),
            temperatures=wanted,
            logprobs=logprobs,
            entropy=entropy,
            values=values,
            row=None if tree is None else shared_row(tree, self.device),
            num_tokens=sum(map(len, sequences)) if tree is None else len(tree.token_ids),
        )

    def _padded(self, sequences: Sequence[Int32Array]) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
        """Return [B, T] ids, 0 where padded, and for each sequence [L] where its tokens stand in B x T."""
        longest = max(len(ids) for ids in sequences)
        if self._cut is not None:
            longest = self._cut.padded(longest)
        rows = np.zeros((len(sequences), longest), np.int64)
        for row, ids in zip(rows, sequences, strict=True):
            row[: len(ids)] = ids
        return rows, [np.arange(len(ids)) + at * longest for at, ids in enumerate(sequences)]

    def check_ids(self, sequences: Sequence[NDArray[np.int32] | NDArray[np.int64]]) -> None:
        for ids in sequences:
            if ids.size and not (ids.min() >= 0 and ids.max() < self.vocab_size):
                raise InvariantError(f"token ids from {ids.min()} to {ids.max()}; the vocabulary has {self.vocab_size}")

    def logprobs(self, batch: Microbatch) -> Tensor:
        """Return [n] float32 log-probs, nats, of the wanted tokens under the current weights; differentiable."""
        logprobs = self.outputs(replace(batch, logprobs=True, entropy=False, values=False)).logprobs
        assert logprobs is not None
        return logprobs

    def values(self, batch: Microbatch) -> Tensor:
        """Return [n] float32 values before the wanted tokens, by the value head; differentiable."""
        values = self.outputs(replace(batch, logprobs=False, entropy=False, values=True)).values
        assert values is not None
        return values

    def outputs(self, batch: Microbatch) -> TokenOutputs:
        """Return what the batch asks for, of one forward pass; differentiable."""
        rows = iter(self._forward(batch))
        if not torch.is_grad_enabled():
            self._reshard()
        return TokenOutputs(
            logprobs=next(rows) if batch.logprobs else None,
            entropy=next(rows) if batch.entropy else None,
            values=next(rows) if batch.values else None,
        )

    def _reshard(self) -> None:
        if isinstance(self.module, FSDPModule):
            # FSDP keeps the root's weights gathered for a backward pass, which does not come; they would go stale.
            self.module.reshard()

    def _token_rows(self, batch: Microbatch) -> Tensor:
        """Return [k, n]: a row for each thing that the batch asks for, in the order of `TokenOutputs`."""
        if self._cut is not None:
            return self._cut_rows(batch, self._cut)
        if batch.row is not None:
            share_prefixes(self.module)
        tree = {} if batch.row is None else {"position_ids": batch.row.depths, "shared_row": batch.row}
        hidden = self._base(input_ids=batch.input_ids, use_cache=False, **tree).last_hidden_state
        return self._head_rows(hidden, batch.positions, batch.targets, batch.temperatures, batch)

    def _cut_rows(self, batch: Microbatch, cut: SequenceCut) -> Tensor:
        ids, places = cut.own_tokens(batch.input_ids)
        outputs = self._base(input_ids=ids, position_ids=places, use_cache=False, sequence_group=cut.group)
        own, positions = cut.own_wanted(batch.positions, batch.input_ids.shape[1])
        temperatures = None if batch.temperatures is None else batch.temperatures[own]
        rows = self._head_rows(outputs.last_hidden_state, positions, batch.targets[own], temperatures, batch)
        return torch.stack([cut.gathered(row, own, len(batch.targets)) for row in rows])

    def _head_rows(
        self, hidden: Tensor, positions: Tensor, targets: Tensor, temperatures: Tensor | None, batch: Microbatch
    ) -> Tensor:
        """Return the rows of `batch` from [B, T, D] hidden states at `positions`; logits in slices of `max_logits`."""
        hidden = hidden.reshape(-1, hidden.shape[-1])[positions]
        found: list[Tensor] = []
        if batch.logprobs:
            found.append(self._logit_rows(hidden, targets, temperatures, entropy=batch.entropy))
        if batch.values:
            assert self.value_head is not None, "values come from a critic"
            found.append(self.value_head(hidden)[None])
        return torch.cat(found)

    def _logit_rows(self, hidden: Tensor, targets: Tensor, temperatures: Tensor | None, *, entropy: bool) -> Tensor:
        """Return [1, n] log-probs of `targets`, or, with `entropy`, [2, n], the entropies below them."""
        rows = max(1, self._max_logits // self.vocab_size)
        token_values = self._logprobs_and_entropy if entropy else self._token_logprobs
        if len(hidden) <= rows:
            return token_values(hidden, targets, temperatures)
        inputs, wanted = hidden.split(rows), targets.split(rows)
        divisors = [None] * len(inputs) if temperatures is None else temperatures.split(rows)
        slices = zip(inputs, wanted, divisors, strict=True)
        return torch.cat([_recomputed(token_values, *each) for each in slices], dim=-1)

    def export(self) -> dict[str, RawTensor]:
        """Return the weights as float32 under their HF checkpoint names, tied ones once; empty on ranks other than 0."""
        return {name: raw_tensor(tensor) for name, tensor in self.weights().items()}

    @property
    def is_split(self) -> bool:
        return isinstance(next(iter(self.parameters.values())), DTensor)

    def weights(self, dtype: torch.dtype | None = None, *, copied: bool = False, in_file: bool = False) -> dict[str, Tensor]:
        """Return the weights on rank 0, nothing on others, under the names of `export`; every rank must call it.

        An adapter is merged into them. Split or merged weights, and those of another `dtype`, are copies; with `copied` all
        are. Otherwise the next step changes them. With `in_file` the copies are in a file and not in host memory.
        """
        state = {name: parameter.detach() for name, parameter in self.parameters.items()}
        if copied or self.leaves_as_copies:
            merging = None if self.adapter is None else self.adapter.merging()
            state = snapshot(state | self.saved_buffers(), self.ranks, dtype=dtype, in_file=in_file, change=merging)
        else:
            state |= self.saved_buffers()
        return self.with_checkpoint_names(state) if self.ranks.rank == 0 else {}

    def num_bytes(self, dtype: torch.dtype | None = None) -> int:
        return sum(tensor.numel() * (dtype or tensor.dtype).itemsize for tensor in self.parameters.values())

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint that are not trained, by name; each rank holds them whole."""
        kept = self.module.state_dict().keys()
        return {name: buffer for name, buffer in self.module.named_buffers() if name in kept}

    def with_checkpoint_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors`, named as in the module, under the names and in the form of its HF checkpoint."""
        return revert_weight_conversion(self.module, tensors)

    def read(self, weights: Mapping[str, StoredTensor], where: Path) -> None:
        """Load the weights of a checkpoint; each rank reads its own parts. A ConfigError changes nothing."""
        read_weights(self.module, self._conversions, weights, where)

    def restore(self, weights: Mapping[str, StoredTensor], where: Path) -> None:
        """Load the trained tensors of a checkpoint; each rank reads its own parts. A ConfigError changes nothing."""
        if self.adapter is None:
            if is_adapter(where):
                raise ConfigError(
                    f"{where}: the checkpoint holds an adapter, and the run file has no trainer.lora; set it as it was, or "
                    "begin a run from what `agentrl merge` makes of the checkpoint"
                )
            self.read(weights, where)
            return
        if not is_adapter(where):
            raise ConfigError(
                f"{where}: the checkpoint holds whole weights and no adapter; remove trainer.lora, or begin a run with "
                "this directory as model.path"
            )
        check_base(where, self.base)
        self.adapter.read(weights, read_adapter_config(where).lora_alpha, where)

    @property
    def _base(self) -> nn.Module:
        return self.module.base_model

    @property
    def _head(self) -> nn.Module:
        return cast("nn.Module", self.module.get_output_embeddings())

    def _blocks(self) -> nn.ModuleList:
        try:
            return cast("nn.ModuleList", self._base.get_submodule("layers"))
        except AttributeError as error:
            raise ConfigError(
                f"{self.path}: {type(self.module).__name__} does not keep its blocks in `layers`, so its weights cannot be "
                "split; use trainer.dtype: float32 with trainer.parallel.dp: 1"
            ) from error

    def _split_layers(self, mesh: TrainerMesh) -> nn.ModuleList:
        """Split layers over tp and sequences over cp; return the blocks that the weights are then sharded by."""
        blocks = self._blocks()
        if mesh.tp is not None:
            config = self.module.config
            check_tensor_fit(
                mesh.tp.size(),
                architecture=config.model_type,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                intermediate=config.intermediate_size,
            )
            for block in blocks:
                split_block(block, mesh.tp)
            split_vocabulary(self.module.get_input_embeddings(), self._head, mesh.tp)
            self.tensor_group = mesh.tp.get_group()
            self._part = vocabulary_part(self.vocab_size, self.tensor_group)
        if mesh.cp is not None:
            self._cut = cut_sequences(self.module, mesh.cp, mesh.shape.tp)
        return blocks

    def _logits(self, hidden: Tensor, temperatures: Tensor | None) -> Tensor:
        logits = (self._head(hidden) if self._head_is_last else self._module_logits(hidden)).float()
        return logits if temperatures is None else logits / temperatures[:, None]

    def _logprobs_and_entropy(self, hidden: Tensor, targets: Tensor, temperatures: Tensor | None) -> Tensor:
        if self._part is not None:
            raise ConfigError(
                "trainer.parallel.tp: the entropy of a vocabulary that ranks share is not computed; set tp to 1, or remove "
                "the entropy term from algorithm.terms"
            )
        every = self._logits(hidden, temperatures).log_softmax(-1)
        return torch.stack([every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)])

    def _token_logprobs(self, hidden: Tensor, targets: Tensor, temperatures: Tensor | None) -> Tensor:
        logits = self._logits(hidden, temperatures)
        if self._part is not None:
            return self._part.logprobs(logits, targets)[None]
        return -functional.cross_entropy(logits, targets, reduction="none")[None]

    def _check_head(self) -> None:
        """Check that the model's logits are what its head makes of the hidden states; every rank must call it.

        Where the module scales them or caps them softly, its own code makes them, and is checked where it has whole weights.
        """
        seen: list[Tensor] = []

        def base_ran(_: nn.Module, __: object, output: BaseModelOutputWithPast) -> None:
            assert output.last_hidden_state is not None
            seen.append(output.last_hidden_state)

        def head_ran(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen.extend([local_part(inputs[0]), output])

        hooks = [self._head.register_forward_hook(head_ran), self._base.register_forward_hook(base_ran)]
        ids = torch.arange(min(4, self.vocab_size), device=self.device)[None]
        more = {} if self._cut is None else {"sequence_group": self._cut.group}
        with torch.no_grad():
            logits = self.module(input_ids=ids, use_cache=False, **more).logits
        self._reshard()
        for hook in hooks:
            hook.remove()
        hidden, inputs, outputs = seen
        if self._head_is_last:
            fits = _are_close(hidden, inputs) and _are_close(outputs, logits)
        else:
            with torch.no_grad():
                fits = self.is_split or _are_close(self._module_logits(hidden.flatten(0, 1)), logits[0])
        if not fits:
            raise ConfigError(
                f"{self.path}: {type(self.module).__name__} makes its logits of more than the last hidden states, which "
                "this trainer does not support; use a decoder with an output head, such as Qwen, Llama, Mistral or Gemma"
            )


def _read_headers(path: Path) -> tuple[PreTrainedModel, dict[str, StoredTensor]]:
    module, stored = empty_model(path), model_tensors(path)
    untie_different(module, stored, lambda first, other: stored[first].whole() != stored[other].whole())
    return module, stored


def _are_close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first.float(), second.float(), rtol=1e-4, atol=1e-4)


def _recomputed(function: Callable[..., Tensor], *arguments: Tensor | None) -> Tensor:
    result = checkpoint(function, *arguments, use_reentrant=False)
    assert isinstance(result, Tensor)
    return result
