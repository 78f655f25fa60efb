"""Which engine runs a model's forwards, decided when the policy is made, by comparing numbers with the model itself.

    fused   our own decoder over prepacked weights (local_fused.py); Llama, Mistral, Qwen2, Qwen3
    shared  the model's own forward, with our cache and attention function; any other decoder with plain attention
    plain   the model's own forward and transformers' own cache, one row at a time (local_plain.py): layers with a
            state (linear attention), images, three-dimensional positions, attention that our function does not know

An engine is used only where its log-probabilities of a prompt and of the steps after it are the model's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from agentrl_cli.policies.local_attention import NotServed, Rows, Seen, one_part, rows_in
from agentrl_cli.policies.local_bases import Base
from agentrl_cli.policies.local_cache import Shelf
from agentrl_cli.policies.local_fused import Fused, transformer
from agentrl_cli.policies.local_kernel import Ragged
from agentrl_cli.policies.local_sharing import share
from agentrl_cli.policies.local_vision import reader_of

_LOG = logging.getLogger(__name__)
KINDS = {"full_attention", "sliding_attention"}
"""Layers whose state is plain keys and values."""
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Most that a log-probability may differ from the model's own in the comparison."""
FAIR_SHARE = 0.25
"""A copy of the weights for sampling may take so much of the memory that is free."""


class Engine(Protocol):
    """Runs rows through a model."""

    name: str
    copies: bool
    """True where it samples from a copy of the weights, which `refresh` renews: the model itself is not run."""
    why: str
    """Why no faster engine runs this model; empty for the fastest."""
    shares: int
    """Rows of up to so many positions may attend to common beginnings; 0: none may."""
    packs: bool
    """True where `packed` may be called."""

    def refresh(self) -> None:
        """The model's weights have changed."""

    def __call__(self, ids: Tensor, rows: Seen, *, head: bool) -> Tensor | None:
        """Feed ids [B, T]; logits of the last position [B, vocabulary], or None where `head` is False."""

    def packed(self, ids: Tensor, view: Ragged) -> Tensor:
        """Feed ids [tokens], any number for each row; logits after each row's last one [rows, vocabulary]."""
        ...


class Shared:
    """The engine `shared`: the model's own forward over our cache."""

    name = "shared"
    copies = False
    packs = False

    def __init__(self, model: nn.Module) -> None:
        self.why, self.shares = "", 0
        self._model = model
        self._config = transformer(model).config.get_text_config()
        if reader_of(model) is not None:
            raise NotServed("it reads images")
        kinds = set(getattr(self._config, "layer_types", None) or ()) - KINDS
        if kinds:
            raise NotServed(f"it has layers of the kind {sorted(kinds)[0]}")
        rope = getattr(self._config, "rope_parameters", None) or getattr(self._config, "rope_scaling", None) or {}
        if "mrope_section" in rope:
            raise NotServed("its positions are three-dimensional")

    def refresh(self) -> None:
        """Nothing to do: the model's own weights are read in every forward."""

    def __call__(self, ids: Tensor, rows: Seen, *, head: bool) -> Tensor | None:
        with rows_in(self._config):
            out = self._model(
                input_ids=ids,
                position_ids=rows.positions,
                # four dimensions: taken as a finished mask and handed on, so that none is built
                attention_mask=ids.new_ones((1, 1, 1, 1), dtype=torch.bool),
                past_key_values=rows,
                use_cache=True,
                logits_to_keep=1,
                rows=rows,
            )
        layers = int(self._config.num_hidden_layers)
        if rows.calls != layers:
            raise NotServed(f"it asked {rows.calls} times for the attention of {layers} layers")
        logits: Tensor = out.logits[:, -1]
        return logits

    def packed(self, ids: Tensor, view: Ragged) -> Tensor:
        raise NotServed("a model's own forward has the same number of tokens for every row")


def choose_engine(model: nn.Module, *, own: bool = False) -> Engine:
    """The fastest engine whose numbers are the model's. Raises NotServed, with every reason, where none is.

    `own`: one that runs the model's own weights.
    """
    reasons: list[str] = []
    kinds: list[Callable[[nn.Module], Engine]] = [Fused, Shared]
    unfit = _no_copy(model) or ("recorded steps run the model's own weights" if own else "")
    if unfit:
        reasons.append(unfit)
        kinds.remove(Fused)
    for kind in kinds:
        try:
            engine = kind(model)
            with sampling_mode(model):
                engine.shares = verify(engine, model)
        except NotServed as why:
            _LOG.debug("engine %s: %s", kind, why.message)
            reasons.append(why.message)
        else:
            engine.why = "; ".join([*reasons, *filter(None, [engine.why])])
            return engine
    raise NotServed("; ".join(dict.fromkeys(reasons)))


@torch.inference_mode()
def verify(engine: Engine, model: nn.Module) -> int:
    """Compare a prompt and two steps after it with one forward of the model. Raises NotServed where they differ.

    Returns how long rows may be that share beginnings: 0 where the attention does not allow it.
    """
    base = transformer(model)
    config = base.config.get_text_config()
    weight = base.get_input_embeddings().weight
    ids = torch.randint(0, weight.shape[0], (2, 6), generator=torch.Generator().manual_seed(0)).to(weight.device)
    wanted = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)[:, 3:]
    layers = int(config.num_hidden_layers)
    shelf = Shelf(64, layers)
    shelf.resize(2)
    found: list[Tensor] = []
    reach = 0
    try:
        for start, end in ((0, 4), (4, 5), (5, 6)):
            rows = Rows(one_part(shelf, 0, 2, end), [start, start], end - start, weight.device)
            logits = engine(ids[:, start:end], rows, head=True)
            assert logits is not None
            found.append(logits.float().log_softmax(-1))
            reach = rows.reach
    except (TypeError, AttributeError, ValueError, NotImplementedError) as error:
        raise NotServed(f"its forward is of another kind ({type(error).__name__}: {error})") from error
    got = torch.stack(found, 1)
    most = TOLERANCE.get(weight.dtype, 1e-3)
    off = difference(got, wanted)
    if off > most:
        raise NotServed(f"the engine {engine.name} differs by {off:.2g} nats from the model's own forward")
    if engine.packs and difference(_packed(engine, ids, layers), wanted[:, 2]) > 1e-3:
        engine.packs, engine.why = False, "its compiled attention differs from the model's own"
    if not reach:
        return 0
    try:
        shared = _shared(engine, ids, layers)
    except (RuntimeError, NotServed) as error:  # a device that lacks one of the operations
        _LOG.debug("rows of the engine %s share no beginnings: %s", engine.name, error)
        return 0
    return reach if difference(shared, wanted[:, 2]) <= most else 0


def difference(got: Tensor, wanted: Tensor) -> float:
    """The largest difference of two tensors; infinite where one has a number and the other has none."""
    if not torch.equal(got.isnan(), wanted.isnan()):
        return torch.inf
    return float((got - wanted).abs().nan_to_num(0.0).max())


def _shared(engine: Engine, ids: Tensor, layers: int) -> Tensor:
    """Log-probabilities after ids [2, 6], computed with the first three of the first row apart from it."""
    bases, shelf = Shelf(64, layers), Shelf(64, layers)
    bases.resize(1)
    shelf.resize(2)
    base = Base(ids[0, :3].cpu().numpy(), bases, 0, "")
    engine(ids[:1, :3], Rows(one_part(bases, 0, 1, 3), [0], 3, ids.device), head=False)
    engine(ids[:1, 3:5], Rows(one_part(shelf, 0, 1, 2), [3], 2, ids.device, share([base], ids.device)), head=False)
    engine(ids[1:, :5], Rows(one_part(shelf, 1, 1, 5), [0], 5, ids.device), head=False)
    both = share([base, None], ids.device)
    logits = engine(ids[:, 5:], Rows(one_part(shelf, 0, 2, 6), [5, 5], 1, ids.device, both), head=True)
    assert logits is not None
    return logits.float().log_softmax(-1)


def _packed(engine: Engine, ids: Tensor, layers: int) -> Tensor:
    """Log-probabilities after ids [2, 6], some of them shared, rows fed with different numbers of tokens."""
    bases, shelf = Shelf(64, layers), Shelf(64, layers)
    bases.resize(1)
    shelf.resize(2)
    base = Base(ids[0, :2].cpu().numpy(), bases, 0, "")
    engine.packed(ids[0, :2], Ragged([(bases, 0)], [0], [2], [None]))
    places = [(shelf, 0), (shelf, 1)]
    engine.packed(torch.cat([ids[0, 2:3], ids[1, :5]]), Ragged(places, [2, 0], [1, 5], [base, None]))
    logits = engine.packed(torch.cat([ids[0, 3:], ids[1, 5:]]), Ragged(places, [3, 5], [3, 1], [base, None]))
    return logits.float().log_softmax(-1)


@contextmanager
def sampling_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, and back."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()


def _no_copy(model: nn.Module) -> str:
    """Why there is to be no copy of the weights, which `fused` works on; empty where there may be one."""
    weights: list[Any] = list(transformer(model).parameters())
    if not weights or weights[0].device.type != "cpu" or weights[0].dtype != torch.float32:
        return "fused is for float32 on a CPU"
    size = sum(int(w.numel()) * int(w.element_size()) for w in weights)
    if size > FAIR_SHARE * free_memory(weights[0].device):
        return f"a copy of the weights takes {size / 2**30:.1f} GiB, more than a quarter of the free memory"
    return ""


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = next(line for line in lines if line.startswith("MemAvailable"))
        return int(found.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):  # not Linux
        return 4 * 2**30
