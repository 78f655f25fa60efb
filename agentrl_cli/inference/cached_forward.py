"""A model's own forward over transformers' own cache, for a batch of sequences of different lengths.

A model's abilities are found by trying it (`Abilities.of`): its numbers after prompts, decode steps and later turns are
compared with one plain forward over whole sequences, whose windows are made so short that they are crossed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentrl_cli.errors import ModelError
from agentrl_cli.inference.batched_cache import NotJoined, has_columns, join, nbytes, select
from agentrl_cli.inference.tolerance import TOLERANCE, logp_difference
from agentrl_cli.models.adapter import short, transformer
from agentrl_cli.models.vision import Seen, plain_logits, reader_of, trial
from agentrl_cli.types import Int32

CAUGHT = (
    *(
        RuntimeError,
        TypeError,
        AttributeError,
        ValueError,
        NotImplementedError,
        IndexError,
        KeyError,
        AssertionError,
    ),
    NotJoined,
)
"""What a forward raises that cannot do what it is asked for."""
CACHES = ("past_key_values", "cache", "cache_params", "state")
"""What forwards call their cache: from transformers 5.24 on most have `cache` in the place of `past_key_values`."""
WINDOW = 24
"""Positions of a window during a trial."""
WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size", "attention_window_size")
"""Where configurations and layers have their windows."""
LENGTHS = (66, 43)
"""Tokens of the prompts of a trial."""
MORE, STEPS = (9, 14), 3
"""New tokens of their second turns; decode steps of a turn."""


def cache_name(base: nn.Module) -> str:
    """Return the argument of a model's forward that is its cache; empty if it takes none."""
    names = inspect.signature(base.forward).parameters
    return next((name for name in CACHES if name in names), "")


class CachedForward:
    """Calls a model with a cache, masks and positions, as far as its forward takes them."""

    def __init__(self, model: nn.Module) -> None:
        base = transformer(model)
        names = inspect.signature(base.forward).parameters
        self.model = model
        self.device = base.get_input_embeddings().weight.device
        self.vocabulary = int(base.get_input_embeddings().weight.shape[0])
        self.columns = True
        """Whether the cache has columns that a mask covers."""
        self._cache = cache_name(base)
        self._names = set(names)
        rule = getattr(getattr(base, "model", None), "get_rope_index", None)
        self.reader = reader_of(model)
        self._three = self.reader is not None and rule is not None

    @property
    def caches(self) -> bool:
        """Whether its forward takes a cache at all."""
        return bool(self._cache)

    def __call__(
        self,
        ids: Tensor,
        lengths: Sequence[int],
        cache: Any,
        *,
        padding: Sequence[int] | None = None,
        shifts: Sequence[int] | None = None,
        every: bool = False,
        seen: Seen | None = None,
    ) -> tuple[Tensor, Any]:
        """Feed new tokens [B, n]; logits [B, V] after the last one, or [B, n, V] of `every` one, and the new cache.

        Args:
            lengths: [B] tokens that the cache has of each sequence; it is padded on the left to the longest.
            padding: [B] how many of the new tokens are padding, on the left; for an empty cache only.
            shifts: [B] distance of a position from its token's number, after images.
            seen: Images among the new tokens, and positions that take the place of the ones made here.
        """
        held = list(lengths) if self.columns else [0] * len(lengths)
        width, count = max(held, default=0), ids.shape[1]
        skipped = [width - n for n in held] if padding is None else list(padding)
        given: dict[str, Any] = {"use_cache": True, self._cache: cache}
        if "attention_mask" in self._names and any(skipped):
            first = self.integers(skipped)[:, None]
            given["attention_mask"] = (
                torch.arange(width + count, device=self.device)[None] >= first
            ).long()
        if seen is not None and self.reader is not None:
            given |= self.reader.arguments(seen, padding or [0] * len(lengths), count, width)
        if "position_ids" in self._names and "position_ids" not in given:
            starts = self.integers(lengths if padding is None else [-n for n in padding])
            places = (starts[:, None] + torch.arange(count, device=self.device)).clamp(min=0)
            if self._three:
                ahead = 0 if shifts is None else self.integers(shifts)[:, None]
                places = (places + ahead).expand(3, -1, -1)
            given["position_ids"] = places
        if "logits_to_keep" in self._names and not every:
            given["logits_to_keep"] = 1
        out = self.model(input_ids=ids, **given)
        logits: Tensor = out.logits
        return logits if every else logits[:, -1], out.get(self._cache)

    def integers(self, numbers: Sequence[int]) -> Tensor:
        """[n] on the model's device; several times faster than torch.tensor of a list."""
        return torch.from_numpy(np.array(numbers, np.int64)).to(self.device)

    def plain(self, contexts: Sequence[Int32]) -> Tensor:
        """Logits [B, V] after whole contexts without a cache, padded on the right: nothing looks ahead."""
        longest = max(map(len, contexts))
        ids = np.zeros((len(contexts), longest), np.int64)
        for line, context in zip(ids, contexts, strict=True):
            line[: len(context)] = context
        logits = self.whole(torch.from_numpy(ids).to(self.device))
        return logits[torch.arange(len(contexts)), [len(context) - 1 for context in contexts]]

    def whole(self, ids: Tensor) -> Tensor:
        """Logits [B, n, V] of the model's plain forward."""
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


@dataclass(frozen=True, slots=True)
class Abilities:
    """The uses of a model's forward that leave its numbers unchanged."""

    cached: bool = False
    """Compute on with its own cache; else every step computes the whole context again."""
    extends: bool = False
    """Add several tokens at once to a cache that has some."""
    batches: str = "single"
    """Which caches make one batch: `any`, those of `equal` length, or only `single` ones."""
    pads: bool = False
    """Compute prompts of different lengths together, padded on the left."""
    columns: bool = True
    """Whether the cache has columns."""
    sequence_bytes: int = 0
    """What the cache of a sequence takes whatever its length."""
    token_bytes: tuple[int, int] = (0, 0)
    """What a token adds to it: up to the longest window, and beyond."""
    window: int = 0
    """The longest window; 0 if there is none."""

    def bytes(self, length: int) -> int:
        """Return the bytes that the cache of so many tokens takes."""
        near = min(length, self.window or length)
        return (
            self.sequence_bytes + self.token_bytes[0] * near + self.token_bytes[1] * (length - near)
        )

    @property
    def limits(self) -> str:
        """Return the parts that are computed again or apart, for people; empty if everything is batched."""
        if not self.cached:
            return "its cache does not continue, so every step computes the whole context again"
        equal = "its cache batches sequences of equal length only"
        return {"any": "", "equal": equal, "single": "its cache holds one sequence only"}[
            self.batches
        ]

    @classmethod
    @torch.inference_mode()
    def of(cls, forward: CachedForward) -> Abilities:
        """Try a model. Raises ModelError if its own plain forward fails or is not causal."""
        with short_windows(forward.model) as window:
            return replace(_Trial(forward).abilities(), window=window)


class _Trial:
    """Two sequences of random tokens, and the model's own log-probabilities after each of their tokens."""

    def __init__(self, forward: CachedForward) -> None:
        generator = torch.Generator().manual_seed(0)
        self.forward = forward
        most = (
            getattr(
                transformer(forward.model).config.get_text_config(), "max_position_embeddings", None
            )
            or 10**9
        )
        longest = [p + m + 2 * STEPS for p, m in zip(LENGTHS, MORE, strict=True)]
        cut = max(0, max(longest) - int(most)) if isinstance(most, int) else 0
        self.prompts = [max(2, n - cut) for n in LENGTHS]
        lengths = [max(n - cut, p + 2) for n, p in zip(longest, self.prompts, strict=True)]
        self.ids = [
            torch.randint(0, forward.vocabulary, (n,), generator=generator).to(forward.device)
            for n in lengths
        ]
        self.dtype = transformer(forward.model).get_input_embeddings().weight.dtype
        self.tolerance = TOLERANCE.get(self.dtype, 1e-3)
        try:
            self.wanted = [_logp(forward.whole(ids[None]))[0] for ids in self.ids]
            prefix = _logp(forward.whole(self.ids[0][None, : self.prompts[0]]))[0]
        except CAUGHT as error:
            raise ModelError(
                f"{type(transformer(forward.model)).__name__} cannot compute a text by itself"
                f" ({type(error).__name__}: {short(error)}).",
                hint="Models are causal decoders that transformers can generate with from token ids alone.",
            ) from error
        if not self._same(prefix, self.wanted[0][: self.prompts[0]]):
            kind = type(transformer(forward.model)).__name__
            if getattr(transformer(forward.model), "is_quantized", False):
                raise ModelError(
                    f"{kind}, quantised, gives a token other numbers with other tokens beside it: in 8 bits outliers"
                    " do that.",
                    hint="Set model.dtype=bfloat16, or model.quantization=4bit.",
                )
            raise ModelError(
                f"{kind} is not a causal decoder: its numbers change with later tokens, or from one forward to the"
                " next.",
                hint="model.name is a causal language model; an encoder has to be made one (is_decoder) before.",
            )

    def abilities(self) -> Abilities:
        forward = self.forward
        start = self._attempt(lambda: self._prompt(0)) if forward.caches else None
        if start is None or not self._attempt(lambda: self._steps([0], start, self.prompts[:1])):
            whole = self._attempt(
                lambda: self._near(forward.plain([self._np(0), self._np(1)[:5]]), [0, 1], [-1, 4])
            )
            return Abilities(batches="any" if whole else "single")
        forward.columns = has_columns(start)
        extends = bool(self._attempt(lambda: self._check_extending(start)))
        batches = "single"
        other = self._attempt(lambda: self._prompt(1))
        if other is not None and self._attempt(
            lambda: self._check_joining([0, 1], [start, other], self.prompts)
        ):
            batches = "any"
        elif self._attempt(
            lambda: self._check_joining([0, 0], [start, start], [self.prompts[0]] * 2)
        ):
            batches = "equal"
        pads = batches == "any" and bool(self._attempt(self._check_padding))
        if forward.reader is not None and not (
            batches == "any" and pads and self._attempt(lambda: self._sees([0, 1]))
        ):
            if not self._attempt(lambda: self._sees([0])):
                return Abilities(batches="single")
            batches, pads = "single", False
        few, some, many = (
            nbytes(self._prompt(0, length)) for length in (8, 16, self.prompts[0] - 8)
        )
        near, far = max((some - few) // 8, 0), max((nbytes(start) - many) // 8, 0)
        return Abilities(
            True, extends, batches, pads, forward.columns, max(few - 8 * near, 0), (near, far)
        )

    def _attempt(self, act: Any) -> Any:
        """Return the result of a try; None if the forward cannot do it."""
        try:
            return act()
        except CAUGHT:
            return None

    def _prompt(self, n: int, length: int | None = None) -> Any:
        """Return the cache of a prompt, if all its numbers are right."""
        count = length or self.prompts[n]
        logits, cache = self.forward(self.ids[n][None, :count], [0], None, every=True)
        return cache if self._same(_logp(logits)[0], self.wanted[n][:count]) else None

    def _steps(self, which: Sequence[int], cache: Any, lengths: Sequence[int]) -> bool:
        """Decode steps of some sequences together."""
        cache, at = select(cache, range(len(which))), list(lengths)
        for _ in range(STEPS):
            ids = torch.stack([self.ids[n][place] for n, place in zip(which, at, strict=True)])[
                :, None
            ]
            logits, cache = self.forward(ids, at, cache)
            if not self._near(logits, which, at):
                return False
            at = [place + 1 for place in at]
        return True

    def _check_extending(self, start: Any) -> bool:
        """Return a later turn: several tokens at once, then decode steps."""
        begin, end = self.prompts[0], min(self.prompts[0] + MORE[0], len(self.ids[0]) - STEPS)
        logits, cache = self.forward(
            self.ids[0][None, begin:end], [begin], select(start, [0]), every=True
        )
        same = self._same(_logp(logits)[0], self.wanted[0][begin:end])
        return same and self._steps([0], cache, [end])

    def _check_joining(
        self, which: Sequence[int], caches: Sequence[Any], lengths: Sequence[int]
    ) -> bool:
        """Two sequences in one batch; apart again, each continues alone."""
        both = join([select(cache, [0]) for cache in caches])
        if not self._steps(which, both, lengths):
            return False
        return all(
            self._steps([which[n]], select(both, [n], lengths[n]), [lengths[n]])
            for n in reversed(range(len(which)))
        )

    def _check_padding(self) -> bool:
        """Both prompts in one forward."""
        width = max(self.prompts)
        padding = [width - n for n in self.prompts]
        ids = torch.stack(
            [nn.functional.pad(self.ids[n][: self.prompts[n]], (padding[n], 0)) for n in (0, 1)]
        )
        logits, cache = self.forward(ids, [0, 0], None, padding=padding, every=True)
        found = _logp(logits)
        same = all(
            self._same(found[n, padding[n] :], self.wanted[n][: self.prompts[n]]) for n in (0, 1)
        )
        return same and self._steps([0, 1], cache, self.prompts)

    def _sees(self, which: Sequence[int]) -> bool:
        """Conversations with images in one forward, then a decode step."""
        forward, reader = self.forward, self.forward.reader
        assert reader is not None
        found = trial(reader, forward.vocabulary, forward.device)
        texts, images = [found[n][0] for n in which], [found[n][1] for n in which]
        wanted = [_logp(plain_logits(forward.model, reader, *found[n])) for n in which]
        lengths = [len(ids) - 1 for ids in texts]
        padding = [max(lengths) - n for n in lengths]
        ids = torch.stack(
            [
                nn.functional.pad(ids[:-1], (left, 0))
                for ids, left in zip(texts, padding, strict=True)
            ]
        )
        seen = reader.gather(forward.model, [ids[:-1] for ids in texts], images, [0] * len(which))
        logits, cache = forward(ids, [0] * len(which), None, padding=padding, seen=seen)
        before = torch.stack([line[-2] for line in wanted])
        last = torch.stack([ids[-1] for ids in texts])[:, None]
        after = forward(last, lengths, cache, shifts=seen.shifts)[0]
        return self._same(_logp(logits), before) and self._same(
            _logp(after), torch.stack([w[-1] for w in wanted])
        )

    def _np(self, n: int) -> Int32:
        return self.ids[n].cpu().numpy().astype(np.int32)

    def _near(self, logits: Tensor, which: Sequence[int], at: Sequence[int]) -> bool:
        found = _logp(logits)
        return all(
            self._same(line, self.wanted[n][place])
            for line, n, place in zip(found, which, at, strict=True)
        )

    def _same(self, found: Tensor, wanted: Tensor) -> bool:
        return logp_difference(found, wanted, self.dtype) <= self.tolerance


def _logp(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


@contextmanager
def short_windows(model: nn.Module, window: int = WINDOW) -> Iterator[int]:
    """Yield a model whose windows are short, so that few tokens cross them; they are put back. Yields the longest of
    them.
    """
    config = transformer(model).config
    holders: list[Any] = [config, config.get_text_config(), *transformer(model).modules()]
    before = []
    for holder in {id(holder): holder for holder in holders}.values():
        for name in WINDOWS:
            size = vars(holder).get(name)
            if isinstance(size, int) and not isinstance(size, bool) and size > 0:
                before.append((holder, name, size))
    try:
        for holder, name, size in before:
            setattr(holder, name, min(size, window))
        yield max((size for *_, size in before), default=0)
    finally:
        for holder, name, size in before:
            setattr(holder, name, size)
