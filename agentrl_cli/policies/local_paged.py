"""The decode batch whose keys and values are pages, for decode steps of fixed shapes (local_graphs.py).

Everything else is DecodeBatch's: who is admitted, what is shared, parked and given up. Every row has a shelf of its
own, whose pages stay where they are as long as the episode lives. Beginnings are shared under every kind of attention:
a row's table names their pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from agentrl_cli.policies.local_attention import NotServed
from agentrl_cli.policies.local_bases import Base, Bases
from agentrl_cli.policies.local_batch import Begin, DecodeBatch, Place
from agentrl_cli.policies.local_cache import BLOCK, Parked, Shelf, blocks, rounded
from agentrl_cli.policies.local_engine import TOLERANCE, Engine, difference, sampling_mode
from agentrl_cli.policies.local_graphs import Capture, Seat, Steps
from agentrl_cli.policies.local_memory import gathered_pages, wide_rows
from agentrl_cli.policies.local_pages import Paged, PagedShelf, Pool, paged
from agentrl_cli.policies.local_request import Request, draw_tokens


class PagedBatch(DecodeBatch):
    """Live rows over pages. The other arguments are DecodeBatch's.

    Args:
        make: Makes what records steps; None: they have fixed shapes and are run as they are.
    """

    def __init__(self, model: Any, engine: Engine, *, make: Callable[[], Capture] | None, **limits: Any) -> None:
        device = model.get_input_embeddings().weight.device
        most = min(limits["limit"], limits["budget"] * BLOCK)
        self.pool = Pool(int(model.config.get_text_config().num_hidden_layers), limits["budget"])
        gathered = gathered_pages(model)
        sizes = {"rows": limits["rows"], "pages": blocks(most) + 1, "gathered": gathered, "device": device}
        self.steps = Steps(engine, model, self.pool, make=make, **sizes)
        self._woken = False
        """The model was found in training mode."""
        super().__init__(model, engine, **limits)
        self.apart = self.sharing = True
        self.make = partial(PagedShelf, self.pool)
        self.bases = Bases(self.layers, self.make)

    @property
    def why(self) -> str:
        return "; ".join(filter(None, [self.engine.why, self.steps.why]))

    @property
    def bytes(self) -> int:
        return self.pool.bytes

    def renew(self, version: str) -> None:
        super().renew(version)
        self.steps.look()

    def clear(self) -> None:
        super().clear()
        self.pool.clear()
        self.steps.rest()
        self._wake()

    def rest(self) -> None:
        super().clear()  # all pages are free, and stay: so does what was recorded
        self._wake()

    def step(self, fresh: list[Request]) -> list[Request]:
        if fresh:
            self.steps.look()
        if self.model.training:  # once, not in every step: a walk through all modules takes longer than a recorded one
            self.model.eval()
            self._woken = True
        return super().step(fresh)

    def _wake(self) -> None:
        """The model in the mode that it was found in."""
        if self._woken:
            self.model.train()
            self._woken = False

    def set_aside(self, request: Request) -> None:
        super().set_aside(request)
        request.share(None)  # one that is over holds no pages, whoever holds it

    def _draw(self, logits: torch.Tensor, live: list[Request]) -> None:
        draw_tokens(logits, live, self.limit, self.notes, wide_rows(self.vocabulary))

    def _padded(self, rows: list[Request | None], live: list[Request]) -> torch.Tensor:
        seats = []
        for shelf, request in zip(self.shelves, live, strict=True):  # each has a shelf of its own
            assert isinstance(shelf, PagedShelf)
            seats.append(Seat(request.last, request.length - 1, shelf, request.base))
        return self.steps(seats)

    # --- prompts -----------------------------------------------------------------------------------------------------

    def _alike(self, length: int, other: int) -> bool:
        return max(length, other) <= 2 * min(length, other)  # all attend to as much as the longest

    def _prefill(self, length: int, requests: list[Request], begins: list[Begin]) -> None:
        places: list[Place] = []
        seated: list[tuple[Request, Begin]] = []
        for request, begin in zip(requests, begins, strict=True):
            found = self._seat(request, begin)
            if found is not None:
                places.append((found[0], 0))
                seated.append((request, found[1]))
        if seated:
            news = [request.context[begin.start : -1] for request, begin in seated]
            self._feed(places, news, [begin.start for _, begin in seated], [begin.base for _, begin in seated])

    def _seat(self, request: Request, begin: Begin) -> tuple[Shelf, Begin] | None:
        """A shelf for a request, and what it really begins with; None where memory is short, and it waits again."""
        self.parked.pop(request.key, None)
        own = begin.source if isinstance(begin.source, Parked) else None
        if own is not None:
            shelf = self.resume(request, own)
            if shelf is not None:
                return shelf, begin
            own.shelf = None  # its pages come back
            begin = Begin(0 if begin.base is None else begin.base.length, begin.base)
        placed = self.place(self.wanted(request), [request], {})
        if placed is None:
            return None
        if isinstance(begin.source, Base):
            own_start = begin.start - (0 if begin.base is None else begin.base.length)
            placed[0].fill([0], begin.source.layers, own_start)
        return placed[0], begin

    def resume(self, request: Request, parked: Parked) -> Shelf | None:
        """The row that an episode was parked with, longer if need be and if there is room."""
        shelf = parked.shelf
        if shelf is None:
            return None
        if shelf.length < min(request.local + BLOCK, rounded(self.limit - request.shared)):
            length = self._shelf_length(request.local + BLOCK, request.shared)
            if not self.make_room(blocks(length)):
                return None
            shelf.lengthen(length)
        shelf.live.append(request)
        self.shelves.append(shelf)
        self.peak = max(self.peak, self.used)
        return shelf

    def _lift(self, request: Request, shelf: Shelf) -> None:
        shelf.lengthen(self._shelf_length(request.local + BLOCK, request.shared))  # `grow` made room
        self.peak = max(self.peak, self.used)

    def _view(self, places: list[Place], starts: list[int], counts: list[int], bases: Sequence[Base | None]) -> Paged:
        return paged(self.pool, places, starts, counts, bases, self.device)


@torch.inference_mode()
def check_pages(engine: Engine, model: Any, make: Callable[[], Capture] | None) -> None:
    """Compare prompts and steps over pages, recorded ones too, with one forward of the model.

    Raises NotServed where they differ or fail, or where a step cannot be recorded.
    """
    try:
        _check_pages(engine, model, make)
    except (RuntimeError, TypeError, AttributeError, ValueError, NotImplementedError) as error:
        said = str(error).strip().splitlines() or [""]
        raise NotServed(f"steps of fixed shapes fail ({type(error).__name__}: {said[0]})") from error


def _check_pages(engine: Engine, model: Any, make: Callable[[], Capture] | None) -> None:
    weight = model.get_input_embeddings().weight
    device, layers = weight.device, int(model.config.get_text_config().num_hidden_layers)
    ids = torch.randint(0, weight.shape[0], (2, 9), generator=torch.Generator().manual_seed(0)).to(device)
    pool = Pool(layers, 8)
    common, *own = shelves = [PagedShelf(pool, BLOCK, layers) for _ in range(3)]
    for shelf in shelves:
        shelf.resize(1)
    base = Base(ids[0, :3].cpu().numpy(), common, 0, "")
    steps = Steps(engine, model, pool, rows=2, pages=4, gathered=8, device=device, make=make)
    with sampling_mode(model):
        wanted = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        engine(ids[:1, :3], paged(pool, [(common, 0)], [0], [3], [None], device), head=False)
        news = torch.stack([ids[0, 3:7], ids[1, :4]])  # of the first row's only two count
        engine(news, paged(pool, [(own[0], 0), (own[1], 0)], [3, 0], [2, 4], [base, None], device), head=False)
        for start in range(4):  # run, recorded and compared, compared, played
            at = (5 + start, 4 + start)
            seats = [Seat(int(ids[n, at[n]]), at[n], own[n], (base, None)[n]) for n in range(2)]
            found = steps(seats).float().log_softmax(-1)
            off = difference(found, torch.stack([wanted[n, at[n]] for n in range(2)]))
            if off > TOLERANCE.get(weight.dtype, 1e-3):
                raise NotServed(f"steps of fixed shapes differ by {off:.2g} nats from the model's own forward")
    if steps.why:
        raise NotServed(steps.why)
