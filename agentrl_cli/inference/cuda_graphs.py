"""Decode steps of fixed shapes, captured once and replayed: CUDA graphs. Off by default: never run on a GPU yet.

A step is padded to few shapes. All that differs from one step to the next (tokens, positions, block tables) is one
tensor that stays where it is; so do the pool of blocks, the weights and the logits. So the launches of a step can be
captured and replayed for other tokens and other sequences.

What captures is a `Capture`: `CudaCapture` on a GPU. The tests have one that replays operations on a CPU. Every graph
is compared with the step itself in its first two uses; where they differ, or where capturing fails, steps go on without
graphs, and the engine line and the log say why.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agentrl_cli.inference.decode_attention import DecodeView, Tables
from agentrl_cli.inference.decode_batch import Shape, decode_batch, pad_batch, unpack
from agentrl_cli.inference.kv_cache import BlockPool
from agentrl_cli.inference.memory import MOST_GRAPHS
from agentrl_cli.inference.model_runner import ModelRunner
from agentrl_cli.inference.request import TokenSequence
from agentrl_cli.inference.tolerance import TOLERANCE, difference

_LOG = logging.getLogger(__name__)
CHECKS = 2
"""Uses of a graph in which it is compared with the step itself."""

Step = Callable[[], None]
"""Computes on tensors that stay where they are."""
Capture = Callable[[Step], Step]
"""Captures a step and returns a function that replays it. Raises RuntimeError if it cannot."""


class CudaCapture:
    """Captures CUDA graphs, all in one pool of memory: they never run at once, and none keeps a result in it.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._device = device
        self._stream = cuda.Stream(device)
        self._memory = cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        cuda = self._cuda
        graph = cuda.CUDAGraph()
        here = cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        try:
            # The stream is set around the capture, too: one that fails does not put back what was set before.
            with cuda.stream(self._stream):
                step()  # on this stream, so that libraries have their workspaces before
                # Another thread may allocate meanwhile: a training that runs beside.
                with cuda.graph(
                    graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
                ):
                    step()
        except RuntimeError:
            # A capture that failed keeps the state of the device's random numbers in some releases of torch, and
            # dropout would raise "Offset increment outside graph capture" from then on. A copy is not shared.
            number = self._device.index
            number = cuda.current_device() if number is None else number
            generator = cuda.default_generators[number]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        finally:
            here.wait_stream(self._stream)
        replay: Step = graph.replay
        return replay


@dataclass(slots=True)
class Graph:
    """A captured step, and how often it was compared."""

    replay: Step
    checks: int = 0


class GraphRunner(ModelRunner):
    """A ModelRunner whose decode steps are captured. `make` makes what captures, again after graphs were dropped."""

    def __init__(self, model: nn.Module, make: Callable[[], Capture]) -> None:
        self.graphs: OrderedDict[Shape, Graph] = OrderedDict()
        self.captures = 0
        """How many steps were captured so far."""
        self.replays = 0
        """How many graphs were replayed without the step beside them."""
        self._make: Callable[[], Capture] | None = make
        self._capture: Capture | None = None
        self._fixed: tuple[Any, ...] = ()
        self._given = self._logits = torch.zeros(0)
        super().__init__(model)
        self.captures = self.replays = 0

    @property
    def records(self) -> bool:
        return self._make is not None

    def decode(
        self,
        pool: BlockPool,
        sequences: Sequence[TokenSequence],
        drafts: Sequence[Sequence[int]] = (),
    ) -> Tensor:
        if drafts or self._make is None or not pool.scratch or pool.keys[0] is None:
            return super().decode(pool, sequences, drafts)
        fixed = (
            pool,
            pool.moves,
            *(t.data_ptr() for t in self.weights.held),
            *addresses(self.model),
        )
        if fixed != self._fixed:
            self.drop()
            self._fixed = fixed
        rows = len(sequences)
        batch = pad_batch(decode_batch(sequences), pool.size)
        shape = batch.layout.shape
        packed = torch.from_numpy(batch.pack())
        if len(self._given) < len(packed):
            self.drop()
            self._fixed = fixed
            self._given = torch.zeros(2 * len(packed), dtype=torch.int64, device=self.device)
        self._given[: len(packed)].copy_(packed)
        if len(self._logits) < shape.rows:
            self.graphs.clear()
            self._logits = torch.zeros(
                shape.rows, self.vocabulary, dtype=self.dtype, device=self.device
            )
        self._run(pool, shape, len(packed))
        return self._logits[:rows]

    def drop(self) -> None:
        """Forget all graphs."""
        self.graphs.clear()
        self._capture = None  # its memory goes with its graphs
        self._fixed = ()

    def _run(self, pool: BlockPool, shape: Shape, size: int) -> None:
        def step() -> None:
            given, *tables = unpack(self._given[:size], shape)
            view = DecodeView(pool, given, Tables(tables, shape, in_place=True))
            self._logits[: shape.rows].copy_(self.run(given[0][:, None], view))

        graph = self.graphs.get(shape) or self._capture_graph(shape, step)
        if graph is None:
            step()
            return
        self.graphs.move_to_end(shape)
        if graph.checks < CHECKS:
            self._check(graph, step, self._logits[: shape.rows])
        else:
            graph.replay()
            self.replays += 1

    def _capture_graph(self, shape: Shape, step: Step) -> Graph | None:
        assert self._make is not None
        if len(self.graphs) >= MOST_GRAPHS:
            self.graphs.popitem(last=False)  # the one that was not used for longest
        try:
            if self._capture is None:
                self._capture = self._make()
            graph = self.graphs[shape] = Graph(self._capture(step))
        except RuntimeError as error:  # of CUDA; memory, too
            said = str(error).strip().splitlines() or [""]
            self._give_up(f"capturing a step failed ({type(error).__name__}: {said[0]})")
            return None
        self.captures += 1
        return graph

    def _check(self, graph: Graph, step: Step, logits: Tensor) -> None:
        """Replay a graph, and run the step itself, whose result stands. If they differ, graphs are turned off."""
        graph.checks += 1
        logits.fill_(torch.nan)  # one that writes nothing is found out
        graph.replay()
        replayed = logits.float().log_softmax(-1)
        step()
        off = difference(replayed, logits.float().log_softmax(-1))
        if off > TOLERANCE.get(logits.dtype, 1e-3):
            self._give_up(f"a captured step differs by {off:.2g} nats from the step itself")

    def _give_up(self, why: str) -> None:
        self.why, self._make = f"no CUDA graphs: {why}", None
        self.drop()
        _LOG.warning("%s; steps go on without them, which is slower", self.why)


def addresses(model: nn.Module) -> tuple[Any, ...]:
    """Return where a model's weights lie and which adapters are on: both are part of a captured step."""
    found: list[Any] = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
    every: Any = model.modules()
    for module in every:
        if hasattr(module, "active_adapters") and hasattr(module, "scaling"):
            found.append((module.merged, module.disable_adapters))
            found += [(name, module.scaling.get(name)) for name in module.active_adapters]
    return tuple(found)
