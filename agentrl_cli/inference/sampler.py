"""Drawing tokens from logits, one row per sequence, each with its own random numbers.

In this order, as in transformers: `steer` changes the logits (repetition penalty, forbidden and allowed tokens); the
temperature divides them; top-k, top-p and min-p take tokens away, and the rest is renormalised. Two
log-probabilities come out: of the distribution that was really sampled, all of the above included, and of the policy at
that temperature, untouched by any of it.

A row's draw depends on its own logits and its own seed alone: `uniforms` are made from the seed when the turn starts,
and token n of the turn uses number n, whatever else is in the batch. The logits themselves may differ in the last bits
with the batch's shape, so equal seeds give equal text as far as that arithmetic allows (exactly, with fixed slots).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from agentrl_cli.errors import EnvError, PolicyError
from agentrl_cli.inference.request import NUMBERS, Request
from agentrl_cli.types import TOP_K, Float32, Int32, Sampling

_Drawn = tuple[int, Float32, bool, Int32 | None]
"""A token, its record, whether it was the only one, and those that could be drawn: as Request.take has them."""
_STRIDE = 64
DRAWN = 2**21
"""Rows times vocabulary of one draw: a step with more is drawn in parts."""


@dataclass(slots=True)
class Draw:
    """One sampled token per row; all [rows] but the top ones, which are [rows, TOP_K]."""

    ids: torch.Tensor
    logp_sampled: torch.Tensor
    logp_policy: torch.Tensor
    entropy: torch.Tensor
    top_ids: torch.Tensor
    top_logps: torch.Tensor
    support: list[Int32 | None]
    """For each row the tokens that could be drawn; None: all, or not asked for."""


def uniforms(seed: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """[count] float64 in [0, 1), a function of the seed alone."""
    return np.random.Generator(np.random.Philox(key=seed & (2**64 - 1))).random(count)


def draw_rows(vocabulary: int) -> int:
    """Return most rows of logits that tokens are drawn from at once."""
    return max(1, DRAWN // vocabulary)


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Raise PolicyError if no token could be drawn with these settings."""
    problem = sampling.problem
    if not problem and max(sampling.bad_ids, default=0) >= vocabulary:
        problem = f"Sampling.bad_ids has {max(sampling.bad_ids)}, and the model knows tokens 0 to {vocabulary - 1}"
    if (
        not problem
        and len(sampling.bad_ids) >= vocabulary
        and len(set(sampling.bad_ids)) == vocabulary
    ):
        problem = "Sampling.bad_ids forbids every token"
    if problem:
        raise PolicyError(
            f"{problem}.",
            hint="A hook's on_sample or the section rollout of the configuration sets it.",
        )


def sample(
    logits: torch.Tensor,
    requests: list[Request],
    limit: int,
    most: int | None = None,
    drafts: Sequence[Sequence[int]] = (),
) -> None:
    """Draw the next token of each request from its row of logits [rows, vocabulary], in parts where that is large.

    `limit`: most positions of a sequence; `most`: rows of a part, if not as many as DRAWN allows. `drafts`: per request
    tokens that may come next, a row of logits after each; a row counts if all before it drew their drafts.
    Raises PolicyError if the probabilities are not numbers.
    """
    rows = draw_rows(logits.shape[-1]) if most is None else most
    behind = drafts or [()] * len(requests)
    given = [
        (r, n) for r, draft in zip(requests, behind, strict=True) for n in range(1 + len(draft))
    ]
    found: list[_Drawn] = []
    for start in range(0, len(given), rows):
        found += _sample(logits[start : start + rows], given[start : start + rows])
    left = iter(found)
    for request, draft in zip(requests, behind, strict=True):
        right = True
        for n, (token, record, forced, support) in enumerate(islice(left, 1 + len(draft))):
            if right and request.stop is None:
                request.take(token, record, limit, forced, support)
                right = n < len(draft) and token == draft[n]


def _sample(logits: torch.Tensor, given: Sequence[tuple[Request, int]]) -> list[_Drawn]:
    """Draw from each row of logits: the token that is so many behind the next one of a request."""
    requests = [request for request, _ in given]
    samplings = [r.sampling for r in requests]
    # `allow` is called once; a row with a single allowed token is drawn like any other, and then takes that one.
    allowed = [_ask_allow(request, logits.shape[-1]) for request in requests]
    contexts = [r.context if r.sampling.repetition_penalty != 1.0 else r.ids for r in requests]
    steered, single = steer(logits, samplings, contexts, allowed)
    numbers = torch.tensor([r.uniforms[len(r.out) + n] for r, n in given], dtype=torch.float64)
    drawn = draw(logits, samplings, numbers, steered, single)
    found = torch.stack((drawn.logp_sampled, drawn.logp_policy, drawn.entropy), 1).float()
    ids = torch.cat((drawn.top_ids, drawn.ids[:, None]), 1).to(torch.int32).view(torch.float32)
    # One tensor: the only time that a step waits for the device.
    table = torch.cat((found, ids[:, :-1], drawn.top_logps.float(), ids[:, -1:]), 1).cpu().numpy()
    records, tokens = table[:, :-1], np.ascontiguousarray(table[:, -1]).view(np.int32).tolist()
    if not bool(np.isfinite(records[:, :NUMBERS]).all()):
        raise PolicyError(
            "The model's probabilities are not numbers.",
            hint="Its weights have diverged: take an older checkpoint.",
        )
    forced = [row in single for row in range(len(tokens))]
    return list(zip(tokens, records, forced, drawn.support, strict=True))


def _ask_allow(request: Request, vocabulary: int) -> Sequence[int] | None:
    """Return the answer of a request's `allow` for its next token. An error ends this request and no other."""
    how = request.sampling
    if how.allow is None or request.error is not None:
        return None
    try:
        wanted = how.allow(tuple(request.out))
        known = None if wanted is None else [int(id_) for id_ in wanted]
        if known is None or (
            known and min(known) >= 0 and max(known) < vocabulary and set(known) - set(how.bad_ids)
        ):
            return known
        beside = ", all of which bad_ids forbids" if set(known) & set(how.bad_ids) else ""
        why = f"gave {known[:8]}{beside}; the model knows tokens 0 to {vocabulary - 1}"
    except Exception as error:  # noqa: BLE001 - a user's own function, whatever it raised
        why = f"raised {type(error).__name__}: {error}"
    hint = "It returns the ids that may come next, or None for all."
    request.error = EnvError(f"Sampling.allow {why}.", hint=hint)
    return None


def draw(
    logits: torch.Tensor,
    samplings: list[Sampling],
    numbers: torch.Tensor,
    steered: torch.Tensor | None = None,
    single: Mapping[int, int] | None = None,
) -> Draw:
    """Sample one token per row.

    Args:
        logits: [rows, vocabulary], any float dtype.
        samplings: One per row.
        numbers: [rows] float64 uniforms; inverse-CDF sampling, so one number decides one token.
        steered: [rows, vocabulary] the logits after `steer`; None if it changed nothing.
        single: Rows with a single possible token, and that token.
    """
    logits = logits.float()
    temperatures = [1.0 if s.greedy else s.temperature for s in samplings]
    plain = all(t == 1.0 for t in temperatures)
    divisor = None if plain else torch.tensor(temperatures, device=logits.device)[:, None]
    logp = torch.log_softmax(logits if divisor is None else logits / divisor, dim=-1)
    probs = logp.exp()
    entropy = -(probs * logp).sum(-1)
    # A token without probability has logp −inf and adds nothing. Asking a GPU whether there is one takes longer.
    if logits.device.type != "cpu" or bool(entropy.isnan().any()):
        entropy = -(probs * logp.clamp(min=-1e4)).sum(-1)
    drawn_logp, drawn_probs = logp, probs
    if steered is not None:
        drawn_logp = torch.log_softmax(steered if divisor is None else steered / divisor, dim=-1)
    if any(s.cut for s in samplings):
        drawn_logp = _truncate(drawn_logp, samplings)
    if drawn_logp is not logp:
        drawn_probs = drawn_logp.exp()
    ids = _invert(drawn_probs, numbers)
    sampled = drawn_logp.gather(1, ids[:, None])[:, 0]
    if any(s.greedy for s in samplings):
        greedy = torch.tensor([s.greedy for s in samplings], device=logits.device)
        ids = torch.where(greedy, (logits if steered is None else steered).argmax(-1), ids)
        # A greedy choice is certain under the distribution that was really sampled.
        sampled = torch.where(greedy, torch.zeros_like(sampled), sampled)
    if single:
        rows = torch.tensor(list(single), device=logits.device)
        ids[rows] = torch.tensor(list(single.values()), device=logits.device)
        sampled[rows] = 0.0
    top_logps, top_ids = logp.topk(min(TOP_K, logp.shape[-1]), dim=-1)
    support = _supports(drawn_logp, [row for row, s in enumerate(samplings) if s.keep_support])
    return Draw(
        ids, sampled, logp.gather(1, ids[:, None])[:, 0], entropy, top_ids, top_logps, support
    )


def _supports(logp: torch.Tensor, rows: Sequence[int]) -> list[Int32 | None]:
    """For every row the ids with a probability if it is one of `rows`; None: all ids. One transfer for all rows."""
    out: list[Int32 | None] = [None] * len(logp)
    if not rows:
        return out
    kept = torch.isfinite(logp if len(rows) == len(logp) else logp[list(rows)])
    found = kept.nonzero().to(torch.int32).cpu().numpy()  # ordered by row
    ends = np.searchsorted(found[:, 0], np.arange(len(rows)), side="right")
    for row, ids in zip(rows, np.split(found[:, 1], ends[:-1]), strict=True):
        out[row] = None if len(ids) == logp.shape[-1] else ids
    return out


def steer(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    contexts: Sequence[Int32],
    allowed: Sequence[Sequence[int] | None],
) -> tuple[torch.Tensor | None, dict[int, int]]:
    """Apply repetition penalty, `bad_ids` and `allow`: new logits (None: none changed), and the rows that have one
    possible token, whose logits stay, with that token.

    The penalty is that of https://arxiv.org/abs/1909.05858 as transformers has it: the logit of every token of the
    context (prompt and answer) is divided by it where positive, multiplied where negative.

    Args:
        logits: [rows, vocabulary].
        contexts: Per row all ids so far; read for a penalty only.
        allowed: Per row what `Sampling.allow` returned: the ids that may come next, None for all.
    """
    wanted = [
        None if ids is None else sorted(set(ids) - set(sampling.bad_ids))
        for ids, sampling in zip(allowed, samplings, strict=True)
    ]
    single = {row: ids[0] for row, ids in enumerate(wanted) if ids is not None and len(ids) == 1}
    chosen = [row for row, s in enumerate(samplings) if s.steered and row not in single]
    if not chosen:
        return None, single
    out = logits.float().clone()
    for row in chosen:
        sampling, kept = samplings[row], wanted[row]
        if sampling.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.unique(contexts[row]).astype(np.int64)).to(out.device)
            old = out[row, seen]
            factor = sampling.repetition_penalty
            out[row, seen] = torch.where(old > 0, old / factor, old * factor)
        if sampling.bad_ids:
            out[row, list(sampling.bad_ids)] = -torch.inf
        if kept is not None:
            left = out[row, kept]
            out[row] = -torch.inf
            out[row, kept] = left
    return out, single


def _invert(probs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the token whose cumulative probability first exceeds the row's number, by float64 sums."""
    rows, vocabulary = probs.shape
    numbers = numbers[:, None].to(probs.device)
    if vocabulary < 2 * _STRIDE**2 or vocabulary % _STRIDE:
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        ids = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)[:, 0]
        return ids.clamp_(max=vocabulary - 1)
    # A large vocabulary in two steps: which stretch, then which token of it. No [rows, vocabulary] float64 is made.
    stretches = probs.view(rows, -1, _STRIDE)
    cumulative = stretches.sum(-1, dtype=torch.float64).cumsum(-1)
    target = numbers * cumulative[:, -1:]
    stretch = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
    before = torch.where(stretch > 0, cumulative.gather(1, (stretch - 1).clamp_(min=0)), 0.0)
    within = stretches[torch.arange(rows, device=probs.device), stretch[:, 0]].cumsum(
        -1, dtype=torch.float64
    )
    place = torch.searchsorted(within, target - before, right=True)
    last = (within < within[:, -1:]).sum(
        -1, keepdim=True
    )  # rounding must not reach beyond the last likely token
    return (stretch * _STRIDE + torch.minimum(place, last))[:, 0]


def _truncate(logp: torch.Tensor, samplings: list[Sampling]) -> torch.Tensor:
    """Keep the top-k tokens, the smallest set of mass top-p, then those of min-p times the best; −inf elsewhere."""
    chosen = [row for row, sampling in enumerate(samplings) if sampling.cut]
    some = [samplings[row] for row in chosen]
    out = logp.clone()
    rows = logp[chosen]
    ordered, order = rows.sort(dim=-1, descending=True)
    rank = torch.arange(rows.shape[-1], device=logp.device)[None]
    size = rows.shape[-1]
    sizes = torch.tensor([min(s.top_k or size, size) for s in some], device=logp.device)
    kept = ordered.masked_fill(rank >= sizes[:, None], -torch.inf)
    kept = kept - kept.logsumexp(-1, keepdim=True)
    before = kept.exp().cumsum(-1) - kept.exp()
    top_p = torch.tensor([s.top_p for s in some], device=logp.device)[:, None]
    kept = kept.masked_fill((before >= top_p) & (rank > 0), -torch.inf)
    least = torch.tensor([s.min_p for s in some], device=logp.device)[:, None]
    kept = kept.masked_fill((kept - kept[:, :1]).exp() < least, -torch.inf)
    kept = kept - kept.logsumexp(-1, keepdim=True)
    out[chosen] = torch.full_like(rows, -torch.inf).scatter(1, order, kept)
    return out
