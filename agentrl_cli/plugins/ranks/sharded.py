"""A rank's part of an update with weights, gradients and optimizer state spread over the ranks (torch's FSDP2).

Each decoder block is a unit, and everything around them is the root: a forward gathers a block's weights just before it
runs. Weights are kept and gradients summed in float32; computations are in `model.dtype`. Rank 0 also has the
whole weights, which sample and are saved: so a checkpoint is that of one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from agentrl_cli.config import Config
from agentrl_cli.config.records import LearnerSettings
from agentrl_cli.learning.forward import Logprobs, logprobs, way_of
from agentrl_cli.learning.packing import Packed
from agentrl_cli.models.adapter import transformer
from agentrl_cli.models.device import pick_dtype
from agentrl_cli.plugins.ranks.compute import Ranks, Replica


class Forward(nn.Module):
    """The training forward as a module: the root unit, whose weights are whole while it runs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(
        self, packed: Packed, temperature: float, checkpoint: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        out = logprobs(self.model, packed, temperature=temperature, checkpoint=checkpoint)
        return out.logp, out.entropy, out.states


class Sharded(Replica):
    """A `Replica` with its share of every weight."""

    spread = True

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        reference: nn.Module | None,
        ranks: Ranks,
        *,
        whole: nn.Module | None,
        checkpoint: bool = False,
    ) -> None:
        """`model` and `reference`: in the CPU's memory, alike on every rank; `whole`: rank 0's copy of the weights."""
        self.whole = whole
        self.mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        dtype = pick_dtype(config.model.dtype, ranks.device)
        for one in (model, reference):
            if one is not None:
                way_of(transformer(one))  # tried while the weights are whole
        sharded = None if reference is None else shard(reference, self.mesh, dtype)
        super().__init__(
            shard(model, self.mesh, dtype),
            LearnerSettings.of(config),
            sharded,
            ranks,
            checkpoint=checkpoint,
        )

    def share(self, state: Mapping[str, Any] | None = None) -> None:
        """Take this rank's part of rank 0's whole weights and state."""
        whole = self._whole_weights()
        with torch.no_grad():
            for number, own in enumerate(self.trained):
                part = self.ranks.share(whole[number] if whole else None, self._part)
                own.copy_(part)
            if self.critic is not None:
                self.critic.head.load_state_dict(self.ranks.share(self.critic.head.state_dict()))
        if not self.ranks.share(state is not None):
            return
        given = state or {}
        self.optimizer.load_state_dict(
            self.ranks.share(
                given.get("optimizer"), lambda one: self._part(one) if one.ndim else one
            )
        )
        critic = self.ranks.share(given.get("critic"))
        if self.critic is not None and critic is not None:
            self.critic.load(critic)

    def require_fit(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError or KeyError unless it is the state of an AdamW of weights with these shapes."""
        for number, kept in state["optimizer"]["state"].items():
            if kept["exp_avg"].shape != self.trained[number].shape:
                raise ValueError(f"weight {number} has another shape")

    def state(self) -> dict[str, Any]:
        """Return what one process would keep, on rank 0."""

        def gather(part: DTensor) -> Tensor | None:
            full = part.full_tensor()  # all ranks take part
            return full.cpu() if self.ranks.rank == 0 else None

        found: dict[str, Any] = tree_map_only(DTensor, gather, super().state())
        return found

    @torch.no_grad()
    def end(self) -> None:
        """Copy the trained weights into rank 0's whole ones."""
        super().end()
        whole = self._whole_weights()
        for number, own in enumerate(self.trained):
            full = _full(own)
            if whole:
                whole[number].copy_(full)

    def _whole_weights(self) -> list[nn.Parameter]:
        """Return rank 0's whole weights that are trained; none elsewhere."""
        return [] if self.whole is None else [w for w in self.whole.parameters() if w.requires_grad]

    def _part(self, full: Tensor) -> Tensor:
        """Return this rank's share of a tensor that every rank has."""
        placed = self.trained[0]
        assert isinstance(placed, DTensor)
        return distribute_tensor(
            full.to(self.ranks.device), self.mesh, placed.placements, src_data_rank=None
        )

    def _logprobs(self, model: nn.Module, packed: Packed) -> Logprobs:
        return Logprobs(*model(packed, self.config.rollout.temperature, self.checkpoint))

    def _sum_gradients(self, weights: Any) -> None:
        """Sum those of the value head: FSDP has summed the model's."""
        super()._sum_gradients(self._head())

    def _clip(self, max_norm: float) -> Tensor:
        return _full(super()._clip(max_norm))


def shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> Forward:
    """Return the training forward of a model whose weights are spread over a mesh; computed in `dtype`, summed in
    float32.
    """
    root, names = Forward(model), set(getattr(model, "_no_split_modules", None) or ())
    policy = MixedPrecisionPolicy(None if dtype == torch.float32 else dtype, torch.float32)
    for block in [module for module in model.modules() if type(module).__name__ in names]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(root, mesh=mesh, mp_policy=policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(
                1.0
            )  # losses are divided by global totals: gradients add up
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    return root


def _full(one: Tensor) -> Tensor:
    return one.full_tensor() if isinstance(one, DTensor) else one
