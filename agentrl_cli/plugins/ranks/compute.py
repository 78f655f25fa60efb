"""An update on several ranks: rank 0 deals micro-batches out by their tokens, and every rank runs the same update.

Rank 0 holds tasks, rewards, advantages and the store. The others `follow`: they wait for a call, compute their
micro-batches and send back numbers per token. Gradients are summed, since losses are divided by the totals of the
whole mini-batch. So norms, clipping, KL terms and every aggregation are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from agentrl_cli.config.records import LearnerSettings
from agentrl_cli.errors import ConfigError, RunFailed
from agentrl_cli.learning.compute import Compute, MicroBatch, StepResult, StepSpec, TokenScores
from agentrl_cli.learning.distill import Teacher
from agentrl_cli.learning.packing import Segment, micro_batches
from agentrl_cli.learning.value import Critic
from agentrl_cli.models.adapter import switch_length

T = TypeVar("T")
BUCKET = 2**25
"""Numbers that are summed in one all-reduce."""


class Ranks:
    """This process among the ranks of a training. Tensors travel over `group`, everything else over `control`."""

    def __init__(self, control: dist.ProcessGroup, device: torch.device) -> None:
        self.control = control
        self.device = device
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def send(self, *message: Any) -> None:
        """Send a message from rank 0 to all others."""
        dist.broadcast_object_list([message], src=0, group=self.control)

    def receive(self) -> tuple[Any, ...]:
        """Return what rank 0 sends, whenever that is."""
        box: list[tuple[Any, ...]] = [()]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def deal(self, parts: Sequence[T] | None = None) -> T:
        """Send one of `parts` from rank 0 to each rank."""
        box: list[Any] = [None]
        dist.scatter_object_list(
            box, None if parts is None else list(parts), src=0, group=self.control
        )
        found: T = box[0]
        return found

    def collect(self, part: T) -> list[T]:
        """Return the parts of all ranks on rank 0; an empty list elsewhere."""
        box: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(part, box, dst=0, group=self.control)
        return box or []

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors of one dtype over the ranks, in place."""
        begin = 0
        while begin < len(tensors):
            end, numbers = begin, 0
            while end < len(tensors) and (end == begin or numbers + tensors[end].numel() <= BUCKET):
                numbers += tensors[end].numel()
                end += 1
            flat = torch.cat([one.reshape(-1) for one in tensors[begin:end]])
            dist.all_reduce(flat)
            parts = torch.split(flat, [one.numel() for one in tensors[begin:end]])
            for one, part in zip(tensors[begin:end], parts, strict=True):
                one.copy_(part.view_as(one))
            begin = end

    def share(self, tree: Any, place: Callable[[Tensor], Tensor] = lambda one: one) -> Any:
        """Return rank 0's nested dicts and lists on every rank; `place` makes the kept form of each tensor."""
        if self.rank == 0:
            self.send(tree_map_only(Tensor, lambda one: one.detach().to("meta"), tree))
        else:
            (tree,) = self.receive()

        def send(one: Tensor) -> Tensor:
            own = torch.empty(one.shape, dtype=one.dtype) if one.is_meta else one.detach().cpu()
            own = own.contiguous()
            dist.broadcast(own, src=0, group=self.control)
            return place(own)

        return tree_map_only(Tensor, send, tree)


class Replica(Compute):
    """A rank's part of an update, with all weights on every rank."""

    spread = False
    """Whether each rank has a part of the weights only."""

    def __init__(
        self,
        model: nn.Module,
        config: LearnerSettings,
        reference: nn.Module | None,
        ranks: Ranks,
        *,
        checkpoint: bool = False,
        aside: bool = False,
    ) -> None:
        super().__init__(model, config, reference, checkpoint=checkpoint, aside=aside)
        self.ranks = ranks

    def require_fit(self, state: Mapping[str, Any]) -> None:
        """Load a state on rank 0 before it is shared. Raises what loading it raises if it is another learner's."""
        super().load_state(state)

    def share(self, state: Mapping[str, Any] | None = None) -> None:
        """Take over rank 0's trained weights, and its state if it has one."""
        with torch.no_grad():
            for weights, sent in zip(self.trained, self.ranks.share([*self.trained]), strict=True):
                weights.copy_(sent)
            if self.critic is not None:
                self.critic.head.load_state_dict(self.ranks.share(self.critic.head.state_dict()))
        kept = self.ranks.share(state)
        if kept is not None and self.ranks.rank:
            self.load_state(kept)

    def _add_up(self, loss: float) -> float:
        self._sum_gradients([*self.trained, *self._head()])
        total = torch.tensor([loss], dtype=torch.float64)
        dist.all_reduce(total, group=self.ranks.control)
        return float(total)

    def _head(self) -> list[nn.Parameter]:
        return [] if self.critic is None else list(self.critic.head.parameters())

    def _sum_gradients(self, weights: Sequence[nn.Parameter]) -> None:
        """Sum over the ranks. A weight without a gradient on any rank keeps none: the optimizer leaves it alone."""
        have = torch.tensor([float(one.grad is not None) for one in weights])
        dist.all_reduce(have, group=self.ranks.control)
        used = [one for one, count in zip(weights, have.tolist(), strict=True) if count]
        for one in used:
            one.grad = torch.zeros_like(one) if one.grad is None else one.grad
        for dtype in dict.fromkeys(one.dtype for one in used):  # on all ranks in the same order
            self.ranks.add_up(
                [one.grad for one in used if one.grad is not None and one.dtype == dtype]
            )


class Lead:
    """Rank 0's `ModelCompute`: every call is made on all ranks. Raises RunFailed if one of them is lost."""

    def __init__(self, local: Replica, fault: Callable[[float], RunFailed | None]) -> None:
        """`fault` reports a lost rank; it waits so many seconds for the report."""
        self.local = local
        self.ranks = local.ranks
        self._fault = fault
        with self._together("share"):
            local.share()

    @property
    def optimizer(self) -> Any:
        return self.local.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self.local.optimizer = optimizer

    @property
    def critic(self) -> Critic | None:
        return self.local.critic

    def fault(self) -> RunFailed | None:
        """Return why the ranks cannot continue; None if all are well."""
        return self._fault(0)

    def teach(self, teacher: Teacher) -> None:
        """Raise ConfigError: a teacher's model would have to be on every rank."""
        raise ConfigError(
            "A teacher works in one process.", hint="Leave out --gpus, --ranks and --nodes."
        )

    def split(self, segments: Sequence[Sequence[Segment]]) -> list[list[tuple[int, int]]]:
        """Split as `Compute.split` does, into enough micro-batches for all ranks."""
        budget, switch = self.local.config.train.token_budget, switch_length(self.local.model)
        return split_for(segments, budget, self.ranks.size, switch)

    def state(self) -> dict[str, Any]:
        """Return the state of one process, whatever the number of ranks."""
        with self._together("state"):
            return self.local.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue everywhere from what `state` returned and from the weights that rank 0 has."""
        self.local.require_fit(state)
        with self._together("share"):
            self.local.share(
                {name: state[name] for name in ("optimizer", "critic") if name in state}
            )

    def begin(self, lr: float) -> None:
        with self._together("begin", lr, int(torch.randint(2**31, ()))):
            self.local.begin(lr)

    def end(self) -> None:
        with self._together("end"):
            self.local.end()

    def forward(
        self,
        batches: Sequence[MicroBatch],
        *,
        under: str = "model",
        values: bool = False,
        entropy: bool = False,
    ) -> list[TokenScores]:
        """Compute as `Compute.forward` does, the micro-batches spread over the ranks."""
        wanted: dict[str, Any] = {"under": under, "values": values, "entropy": entropy}
        with self._together("forward", wanted):
            parts, order = deal_batches(batches, self.ranks.size, even=self.local.spread)
            own = self.local.forward(self.ranks.deal(parts), **wanted)
            return _in_order(self.ranks.collect(own), order)

    def step(self, batches: Sequence[MicroBatch], spec: StepSpec) -> StepResult:
        """Step as `Compute.step` does, the micro-batches spread over the ranks."""
        with self._together("step", spec):
            parts, places = deal_batches(batches, self.ranks.size, even=self.local.spread)
            own = self.local.step(self.ranks.deal(parts), spec)
            all_ = self.ranks.collect(own)
        metrics: dict[str, float] = {}
        for one in all_:
            for name, value in one.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value
        return replace(own, metrics=metrics, tokens=_in_order([one.tokens for one in all_], places))

    @contextmanager
    def _together(self, *call: Any) -> Iterator[None]:
        """Let the other ranks make a call, which the block makes here."""
        try:
            self.ranks.send(*call)
            yield
        except RuntimeError as error:  # how torch reports a lost connection, and much else
            fault = self._fault(3.0)
            if fault is None:
                raise
            raise fault from error


def follow(local: Replica) -> None:
    """Compute what rank 0 calls for, until it ends the training."""
    ranks = local.ranks
    while True:
        name, *arguments = ranks.receive()
        if name == "close":
            return
        if name in ("share", "state", "end"):
            getattr(local, name)()
        elif name == "begin":
            lr, seed = arguments
            torch.manual_seed(seed + ranks.rank)  # of an adapter's dropout
            local.begin(lr)
        elif name == "forward":
            ranks.collect(local.forward(ranks.deal(), **arguments[0]))
        elif name == "step":
            ranks.collect(local.step(ranks.deal(), *arguments))


def split_for(
    segments: Sequence[Sequence[Segment]], budget: int, size: int, switch: int = 0
) -> list[list[tuple[int, int]]]:
    """Return `micro_batches`, smaller ones if there are too few for so many ranks."""
    rows = micro_batches(segments, budget, switch=switch)
    if len(rows) < 2 * size:
        tokens = MicroBatch([list(group) for group in segments]).tokens
        fewer = min(budget, max(1, ceil(tokens / size)))
        rows = micro_batches(segments, fewer, switch=switch)
    return _merge_untrained(rows, segments)


def deal_batches(
    batches: Sequence[MicroBatch], size: int, *, even: bool
) -> tuple[list[list[MicroBatch]], list[list[int]]]:
    """Return each rank's micro-batches and their numbers: the largest first, each to the rank with the fewest tokens.

    `even`: all ranks get equally many, by padding with the smallest one. Sharded weights need it: a forward gathers
    them from all ranks.
    """
    tokens = [batch.tokens for batch in batches]
    loads, numbers = [0] * size, [[] for _ in range(size)]  # type: tuple[list[int], list[list[int]]]
    for number in sorted(range(len(batches)), key=lambda n: -tokens[n]):
        rank = min(range(size), key=lambda r: (loads[r], r))
        loads[rank] += tokens[number]
        numbers[rank].append(number)
    parts = [[batches[n] for n in sorted(mine)] for mine in numbers]
    if even and batches:
        padding = replace(batches[min(range(len(batches)), key=lambda n: tokens[n])], padding=True)
        most = max(map(len, parts))
        parts = [part + [padding] * (most - len(part)) for part in parts]
    return parts, [sorted(mine) for mine in numbers]


def _in_order(found: Sequence[Sequence[T]], numbers: Sequence[Sequence[int]]) -> list[T]:
    """Return the results of the ranks in the order of the micro-batches, without those of padding."""
    by_number = {
        n: one
        for part, mine in zip(found, numbers, strict=True)
        for n, one in zip(mine, part, strict=False)
    }
    return [by_number[n] for n in range(len(by_number))]


def _merge_untrained(
    rows: list[list[tuple[int, int]]], segments: Sequence[Sequence[Segment]]
) -> list[list[tuple[int, int]]]:
    """Merge rows without trained tokens into the next one: a forward of nothing would gather no weights."""
    found: list[list[tuple[int, int]]] = []
    waiting: list[tuple[int, int]] = []
    for row in rows:
        if any(segments[g][m].trained.any() for g, m in row):
            found.append([*waiting, *row])
            waiting = []
        else:
            waiting += row
    if waiting:
        found[-1:] = [[*(found[-1] if found else []), *waiting]]
    return found
