"""Decode steps of fixed shapes, recorded once and played again: CUDA graphs.

A step is padded up to a number of rows (1, 2, 4, 8 …) and to a number of pages a row. All that differs from one step to
the next (tokens, positions, pages) is written into one tensor that stays where it is; keys and values are pages of a
pool (local_pages.py); weights and logits stay where they are as well. So the launches of a step can be recorded and
played again for other tokens and other rows: a step then costs what its kernels cost, and not the Python around them.

What records is a `Capture`: `CudaCapture` on a GPU. The tests have one that plays the recorded operations on a CPU.
Every recording is compared with the step itself in its first two uses, the second one with other numbers; where they
differ, or where recording fails, steps go on unrecorded, and the log says why.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agentrl_cli.policies.local_bases import Base
from agentrl_cli.policies.local_cache import BLOCK, blocks, shelf_length
from agentrl_cli.policies.local_engine import TOLERANCE, Engine, difference
from agentrl_cli.policies.local_memory import MOST_GRAPHS, wide_rows
from agentrl_cli.policies.local_pages import Paged, PagedShelf, Pool, line

_LOG = logging.getLogger(__name__)
CHECKS = 2
"""Uses of a recording in which it is compared with the step itself."""
HEAD = 3
"""Numbers of a row before its pages: token, position, positions of its beginning."""

Step = Callable[[], None]
"""Computes on tensors that stay where they are."""
Capture = Callable[[Step], Step]
"""Records a step, and gives back what does the same work again. Raises RuntimeError where it cannot."""
Shape = tuple[int, int]
"""Rows, and pages of each."""


class CudaCapture:
    """Records CUDA graphs, all in one pool of memory: they never run at once, and none keeps a result in it.

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
                with cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
                    step()
        except RuntimeError:
            self._free_generator()
            raise
        finally:
            here.wait_stream(self._stream)
        replay: Step = graph.replay
        return replay

    def _free_generator(self) -> None:
        """Give the device's random numbers back: a recording that failed keeps their state in some releases of torch.

        Dropout would raise "Offset increment outside graph capture" from then on. A copy of the state is nobody's.
        """
        number = self._device.index
        generator = self._cuda.default_generators[self._cuda.current_device() if number is None else number]
        generator.graphsafe_set_state(generator.clone_state())


class Seat(NamedTuple):
    """A row of a step."""

    token: int
    """Fed by the step."""
    position: int
    shelf: PagedShelf
    base: Base | None
    """What it begins with."""


@dataclass(slots=True)
class Graph:
    """A recorded step, and how often it was compared."""

    play: Step
    checks: int = 0


class Steps:
    """Decode steps of fixed shapes over a pool of pages.

    Args:
        rows: Most rows of a step.
        pages: Most pages of a row, those of its beginning included.
        gathered: Most pages of all rows of a step, padding included; more rows go in several steps.
        make: Makes what records, anew after everything recorded was dropped; None: nothing is recorded.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        pool: Pool,
        *,
        rows: int,
        pages: int,
        gathered: int,
        device: torch.device,
        make: Callable[[], Capture] | None,
    ) -> None:
        self.why = ""
        """Why nothing is recorded any more."""
        self.graphs: OrderedDict[Shape, Graph] = OrderedDict()
        self.captures = 0
        """How many steps were recorded so far."""
        self.plays = 0
        """How many recordings were played without the step beside them."""
        self._engine, self._model, self._pool = engine, model, pool
        self._rows, self._pages, self._gathered = rows, pages, gathered
        self._make = make
        self._capture: Capture | None = None
        self._seen: set[Shape] = set()
        self._fixed: tuple[Any, ...] = ()
        size = rows * (HEAD + pages)
        self._given = torch.zeros(size, dtype=torch.int64, device=device)
        self._here = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._written: tuple[Any, ...] = ()
        """Whose pages stand in `_here`."""
        self._logits: Tensor | None = None

    def __call__(self, seats: Sequence[Seat]) -> Tensor:
        """Logits [rows, vocabulary] after each row's newest token; they stand until the next step."""
        parts = self._parts(seats)
        if len(parts) == 1:
            return self._run(seats)
        found = torch.cat([self._run([seats[n] for n in part]).clone() for part in parts])
        order = torch.tensor([n for part in parts for n in part], device=found.device)
        return torch.empty_like(found).index_copy_(0, order, found)

    def _parts(self, seats: Sequence[Seat]) -> list[list[int]]:
        """Rows whose pages are gathered together: all of them, or the longest ones and others apart."""
        sizes = [blocks(_shared(seat)) + blocks(seat.position + 1 - _shared(seat)) for seat in seats]
        rows, pages = self.shape(len(seats), max(sizes))
        if rows * pages <= self._gathered:
            return [list(range(len(seats)))]
        parts: list[list[int]] = []
        for n in sorted(range(len(seats)), key=lambda n: -sizes[n]):
            if parts:
                rows, pages = self.shape(len(parts[-1]) + 1, sizes[parts[-1][0]])
            if parts and rows * pages <= self._gathered:
                parts[-1].append(n)
            else:
                parts.append([n])
        return parts

    def _run(self, seats: Sequence[Seat]) -> Tensor:
        shape = self._write(seats)
        if self._make is None or not self._recorded(shape):
            self._step(shape)
            self._seen.add(shape)
        assert self._logits is not None
        return self._logits[: len(seats)]

    def look(self) -> None:
        """Drop what was recorded where a tensor lies elsewhere or other adapters are on.

        New weights in the place of the old ones change nothing: a recording reads them where they are.
        """
        fixed = (self._pool.moves, *addresses(self._model))
        if fixed != self._fixed:
            self.drop()
            self._fixed = fixed

    def drop(self) -> None:
        """Forget what was recorded."""
        self.graphs.clear()
        self._seen.clear()
        self._capture = None  # its memory goes with its graphs
        self._fixed = ()

    def rest(self) -> None:
        """Give the memory back."""
        self.drop()
        self._logits = None

    def shape(self, rows: int, pages: int) -> Shape:
        """What a step of so many rows, the longest one of so many pages, is padded up to."""
        wide = blocks(shelf_length(pages * BLOCK))
        return min(1 << (rows - 1).bit_length(), self._rows), min(wide, self._pages)

    # --- one step ----------------------------------------------------------------------------------------------------

    def _write(self, seats: Sequence[Seat]) -> Shape:
        """Tokens, positions and pages into the tensor that steps read; pages only where they have changed."""
        shared = [_shared(seat) for seat in seats]
        most = max(blocks(n) + blocks(seat.position + 1 - n) for n, seat in zip(shared, seats, strict=True))
        rows, pages = shape = self.shape(len(seats), most)
        here = self._here[: rows * (HEAD + pages)]
        table = here.numpy().reshape(rows, HEAD + pages)
        written = (shape, *(_stamp(seat, n) for n, seat in zip(shared, seats, strict=True)))
        if written != self._written:
            table[:] = 0
            for row, (seat, n) in enumerate(zip(seats, shared, strict=True)):
                all_pages = (line(seat.base) + seat.shelf.pages[0])[:pages]
                table[row, HEAD : HEAD + len(all_pages)] = all_pages
                table[row, 2] = n
            self._written = written
        table[: len(seats), 0] = [seat.token for seat in seats]
        table[: len(seats), 1] = [seat.position for seat in seats]
        self._given[: len(here)].copy_(here)  # waits: `here` is written again by the next part of a step
        return shape

    def _step(self, shape: Shape) -> None:
        """The step: no number of its own, no shape that depends on one, nothing that waits for the device."""
        rows, pages = shape
        given = self._given[: rows * (HEAD + pages)].view(rows, HEAD + pages)
        view = Paged(self._pool, given[:, HEAD:], given[:, 1:2], given[:, 2:3])
        logits = self._engine(given[:, :1], view, head=True)
        assert logits is not None
        if self._logits is None:
            self._logits = logits.new_empty(self._rows, logits.shape[1])
        self._logits[:rows].copy_(logits)

    # --- recording ---------------------------------------------------------------------------------------------------

    def _recorded(self, shape: Shape) -> bool:
        """Play the recorded step of a shape; False where there is none, and it is to be run as it is."""
        if not self._fixed or self._fixed[0] != self._pool.moves:
            self.look()
        graph = self.graphs.get(shape)
        if graph is None and shape in self._seen:  # the first time, what is still missing is made: it comes again
            graph = self._record(shape)
        if graph is None:
            return False
        self.graphs.move_to_end(shape)
        if graph.checks < CHECKS:
            self._check(shape, graph)
        else:
            graph.play()
            self.plays += 1
        return True

    def _record(self, shape: Shape) -> Graph | None:
        assert self._make is not None
        if len(self.graphs) >= MOST_GRAPHS:
            self.graphs.popitem(last=False)  # the one that was not used for longest
        try:
            if self._capture is None:
                self._capture = self._make()
            graph = Graph(self._capture(lambda: self._step(shape)))
        except RuntimeError as error:  # of CUDA; memory, too
            said = str(error).strip().splitlines() or [""]
            self._give_up(f"recording a step failed ({type(error).__name__}: {said[0]})")
            return None
        self.captures += 1
        self.graphs[shape] = graph
        return graph

    def _check(self, shape: Shape, graph: Graph) -> None:
        """Play a recording, and run the step itself, whose result stands. If they differ, recording is over."""
        assert self._logits is not None
        graph.checks += 1
        found = self._logits[: shape[0]]
        found.fill_(torch.nan)  # one that writes nothing is found out
        graph.play()
        played = found.clone()
        self._step(shape)
        some = wide_rows(found.shape[1])  # rows at a time: what draws from logits has memory for no more
        parts = [slice(row, row + some) for row in range(0, len(found), some)]
        off = max(difference(*(each[part].float().log_softmax(-1) for each in (played, found))) for part in parts)
        if off > TOLERANCE.get(found.dtype, 1e-3):
            self._give_up(f"a recorded step differs by {off:.2g} nats from the step itself")

    def _give_up(self, why: str) -> None:
        self.why, self._make = f"no CUDA graphs: {why}", None
        self.drop()
        _LOG.warning("%s; steps go on without them, which is slower", self.why)


def _shared(seat: Seat) -> int:
    """Positions of a row's beginning."""
    return 0 if seat.base is None else seat.base.length


def _stamp(seat: Seat, shared: int) -> tuple[int, ...]:
    """Numbers that differ where a row's pages do. No shelf is held on to: its pages would not come back."""
    base = seat.base
    if base is None:
        return (seat.shelf.stamp,)
    assert isinstance(base.shelf, PagedShelf)
    return seat.shelf.stamp, base.shelf.stamp, base.row, shared


def addresses(model: nn.Module) -> tuple[Any, ...]:
    """Where a model's weights lie and which adapters are on: what a recorded step has in it."""
    found: list[Any] = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
    every: Any = model.modules()
    for module in every:
        if hasattr(module, "active_adapters") and hasattr(module, "scaling"):
            found.append((module.merged, module.disable_adapters))
            found += [(name, module.scaling.get(name)) for name in module.active_adapters]
    return tuple(found)
