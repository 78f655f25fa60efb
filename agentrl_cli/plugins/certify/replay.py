"""Replays stored contexts through a model and compares it with the one that was trained: a number for each part.

A gap of log-probabilities is explained by the change of the reference's weights that has the same numbers: base and
checkpoint are the ends of a line, at 0 of which the adapter is missing, and which is as trained at 1 alone; off that
line, the gap is compared with that of weights rounded to a few bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from agentrl_cli.chat.render import Chat
from agentrl_cli.errors import NotFound
from agentrl_cli.evaluate.result import EvalResult, compare
from agentrl_cli.evaluate.stats import Estimate, estimate
from agentrl_cli.plugins.certify.subjects import Address, Here, log_probabilities
from agentrl_cli.store import Store
from agentrl_cli.tasks import Pack
from agentrl_cli.types import Float32, Message, Sampling, ToolSchema

PLACES, EXPLAINED, LIKELY = 8, 6, -3.0
"""Sampled tokens of a context that are compared, those that the training moved most; contexts that explain a gap; least
log-probability of a token that an address is asked for, which lists the likeliest alone."""
KNOTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Scales at which log-probabilities are computed; between them they are interpolated."""
BITS, BLOCK = (6, 5, 4, 3, 2), 32
AGREE = 0.9
"""Share of contexts with the same call that must lie within the interval, or below it."""


@dataclass(frozen=True, slots=True)
class Context:
    """A stored turn of the model: the ids before it, its own, and the conversation before it with its tools."""

    episode: str
    before: list[int]
    own: list[int]
    messages: list[Message]
    tools: list[ToolSchema]

    @property
    def ids(self) -> list[int]:
        """All ids."""
        return [*self.before, *self.own]


@dataclass(frozen=True, slots=True)
class Check:
    """A part of the certificate; `ok` is None if the target cannot be compared, `episode` shows the fault."""

    name: str
    ok: bool | None
    text: str
    value: float | None = None
    fault: str = ""
    episode: str = ""


def read_contexts(store: Store, run: str, packs: Mapping[str, Pack], most: int) -> list[Context]:
    """Return turns of a run's newest episodes, of evaluations first, each task once. Raises NotFound without any."""
    found: dict[str, Context] = {}
    ids = [*store.episodes.ids("kind:eval", "-time", run), *store.episodes.ids("", "-time", run)]
    for row in store.episodes.rows(ids[: 40 * most]):
        task = store.tasks.get(row.task_id, row.pack)
        if row.task_id in found or row.outcome is None or row.pack not in packs or task is None:
            continue
        episode = store.episodes.get(row.id)
        chain = episode.chain(episode.main)
        said = [turn for turn in chain.turns if turn.role == "assistant" and turn.end > turn.start]
        if said and not chain.images and len(found) < most:
            turn, all_ids = said[len(found) % len(said)], chain.tokens.ids.tolist()
            found[row.task_id] = Context(
                f"{episode.id}@t{episode.main.turns[turn.index]}",
                all_ids[: turn.start],
                all_ids[turn.start : turn.end],
                [message for one in chain.turns[: turn.index] for message in one.messages],
                [tool.schema for tool in packs[row.pack].tools_of(task)],
            )
    if not found:
        hint = "`agentrl eval RUN@best` makes some."
        raise NotFound("The run has no episodes of these packs to replay.", hint=hint)
    return list(found.values())


async def check_tokens(ours: Here, target: Here, contexts: Sequence[Context]) -> Check:
    """Compare the tokens of stored texts: one more or less before them is BOS, any other is the tokenizer's."""
    pairs = []
    for one in contexts:
        text = ours.chat.decode(one.ids)
        pairs.append((one, await ours.encode(text), await target.encode(text)))
    shifted = all(a == b or _is_shifted(a, b) for _, a, b in pairs)
    return _compare("tokens", "BOS" if shifted else "tokenizer", "stored texts", pairs)


def _is_shifted(a: Any, b: Any) -> Any:
    if not isinstance(b, list):
        return b is not None and abs(b - len(a)) <= 1
    return a[len(a) - len(b) :] == b if len(b) < len(a) else b[len(b) - len(a) :] == a


async def check_template(ours: Here, target: Here, contexts: Sequence[Context]) -> Check:
    """Compare the texts that conversations become, or their numbers of tokens."""
    pairs: list[tuple[Context, Any, Any]] = []
    for one in contexts:
        given = await target.prompt(one.messages, one.tools)
        text: Any = await ours.prompt(one.messages, one.tools)
        whole = await ours.encode(text) if isinstance(given, int) else text
        pairs.append((one, whole, given))
    return _compare("template", "template", "conversations", pairs)


def _compare(name: str, fault: str, what: str, pairs: Sequence[tuple[Context, Any, Any]]) -> Check:
    known = [pair for pair in pairs if pair[2] is not None]
    wrong = [
        pair for pair in known if (len(pair[1]) if isinstance(pair[2], int) else pair[1]) != pair[2]
    ]
    if not known:
        return Check(name, None, "the target does not tell")
    if not wrong:
        return Check(name, True, f"the same for {len(known)} of {len(known)} {what}", 0.0)
    one, a, b = wrong[0]
    if isinstance(b, int):
        shown = f"{b} tokens for {len(a)}"
    else:
        at = next(
            (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )
        at, end = (max(0, at - 8), at + 24) if isinstance(a, str) else (at, at + 4)
        shown = f"{b[at:end]!r} for {a[at:end]!r}"
    text = f"others for {len(wrong)} of {len(known)} {what}: {shown}"
    return Check(name, False, text, len(wrong) / len(known), fault, one.episode)


async def check_weights(
    ours: Here, base: Any, target: Here, contexts: Sequence[Context], nats: float
) -> Check:
    """Compare log-probabilities of the tokens that the training moved most, and name the cause of a gap."""
    parts: list[tuple[Context, list[int], Float32]] = []
    wanted: list[Float32] = []
    model: Any = ours.loaded.model
    for one in contexts:
        places = np.arange(len(one.before), len(one.ids))
        logps = log_probabilities(model, one.ids, places.tolist())
        moved = np.abs(logps - log_probabilities(base, one.ids, places.tolist()))
        if isinstance(target, Address):
            moved[logps < LIKELY] = -1
        chosen = np.sort(np.argsort(-moved)[:PLACES])
        wanted.append(logps[chosen])
        parts.append(
            (one, places[chosen].tolist(), await target.score(one.ids, places[chosen].tolist()))
        )
    off = gap(np.concatenate(wanted), np.concatenate([given for _, _, given in parts]))
    if np.isnan(off):
        return Check("weights", None, "the target reports no log-probabilities of a given prompt")
    text = f"{off:.4f} nats mean gap of log-probabilities ({nats:g} at most)"
    if off <= nats:
        return Check("weights", True, text, off)
    parts = [
        parts[n]
        for n in np.argsort(
            [-np.nan_to_num(gap(a, p[2])) for a, p in zip(wanted, parts, strict=True)]
        )
    ]
    few = parts[:EXPLAINED]

    def score() -> Float32:
        return np.concatenate([log_probabilities(model, one.ids, at) for one, at, _ in few])

    fault, why = name_fault(model, base.state_dict(), score, np.concatenate([p[2] for p in few]))
    return Check("weights", False, f"{text}: {why}", off, fault, few[0][0].episode)


def gap(ours: Float32, theirs: Float32) -> float:
    """Return the mean difference in nats over the tokens that both know; NaN without one."""
    known = ~np.isnan(theirs)
    return float(np.abs(ours - theirs)[known].mean()) if known.any() else float("nan")


def name_fault(
    model: Any, base: Mapping[str, Any], score: Callable[[], Float32], theirs: Float32
) -> tuple[str, str]:
    """Return the name of the fault and its evidence; `score` computes our numbers with the weights of the moment."""
    import torch

    ours, own = score(), {name: value.detach().clone() for name, value in model.named_parameters()}

    @torch.no_grad()
    def changed(change: Callable[[str, Any], Any]) -> Float32:
        for name, value in model.named_parameters():
            value.copy_(change(name, own[name]))
        return score()

    scored = [changed(partial(_between, base, at)) for at in KNOTS]
    scales, columns = np.linspace(KNOTS[0], KNOTS[-1], 401), np.stack(scored, 1)
    lines = np.stack([np.interp(scales, KNOTS, column) for column in columns], 1).astype(np.float32)
    gaps, now = [gap(line, theirs) for line in lines], gap(ours, theirs)
    scale, left = float(scales[np.argmin(gaps)]), min(gaps)
    rounded = {bits: gap(changed(partial(round_weights, bits)), ours) for bits in BITS}
    changed(lambda _, value: value)
    if left <= now / 2 and abs(scale - 1) > 0.1:
        name = "adapter missing" if scale < 0.15 else "adapter scale"
        return (
            name,
            f"the numbers of the adapter at {scale:.2f} times its scale ({left:.3f} nats left)",
        )
    bits = min(BITS, key=lambda bits: abs(np.log((rounded[bits] + 1e-9) / now)))
    if now <= 1.5 * rounded[BITS[-1]]:
        return "quantisation", f"as far off as weights that are rounded to {bits} bits"
    return "other weights", f"farther off than weights that are rounded to {BITS[-1]} bits"


def _between(base: Mapping[str, Any], scale: float, name: str, value: Any) -> Any:
    return base[name].to(value).lerp(value, scale)


def round_weights(bits: int, name: str, value: Any) -> Any:
    """Return a matrix with weights rounded in blocks of a row; a vector as it is."""
    if value.ndim < 2 or value.shape[-1] % BLOCK:
        return value
    blocks = value.reshape(-1, BLOCK)
    unit = (blocks.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp_min(1e-12)
    return ((blocks / unit).round() * unit).reshape(value.shape)


async def answers(here: Here, chat: Chat, contexts: Sequence[Context], most: int) -> list[Any]:
    """Return the calls of a greedy turn after each context, or its text without any, as the reference reads them."""
    sampling = Sampling(temperature=0.0, max_new_tokens=most, stop_ids=chat.stop_ids)
    found: list[Any] = []
    for one in contexts:
        if isinstance(here, Address):
            here.policy.observe(one.episode, one.messages, one.tools)
        turn = await here.loaded.policy.generate(one.episode, one.before, sampling)
        parsed = chat.parse(turn.ids.tolist(), one.tools or None)
        found.append(
            [(call.name, call.arguments) for call in parsed.calls] or parsed.content.strip()
        )
    return found


def check_calls(ours: Sequence[Any], theirs: Sequence[Any], contexts: Sequence[Context]) -> Check:
    """Compare the greedy turns of both."""
    other = [n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    share = estimate([float(n not in other) for n in range(len(ours))])
    text = f"the same for {_show(share)} of {share.n} contexts, greedily"
    if not other or share.high >= AGREE:
        return Check("calls", True, text, share.value)
    n = other[0]
    return Check(
        "calls",
        False,
        f"{text}; {theirs[n]} for {ours[n]}",
        share.value,
        "calls",
        contexts[n].episode,
    )


def check_pass(ours: EvalResult, theirs: EvalResult) -> Check:
    """Compare pass@1 on the same tasks and seeds."""
    found, rate = compare(ours, theirs, theirs.splits[0]), theirs.score.pass_at[1]
    if not found.tasks:
        return Check("pass@1", None, "no task has attempts of both that could be graded")
    text = f"{_show(rate)} on {rate.n} tasks, {_show(found.difference, '+')} to the reference's"
    fault = "pass@1" if found.difference.high < 0 else ""
    lost = next((flip.episode_after for flip in reversed(found.flips) if fault), "")
    return Check("pass@1", not fault, text, rate.value, fault, lost)


def _show(one: Estimate, sign: str = "") -> str:
    return f"{one.value:{sign}.3f} [{one.low:.3f}, {one.high:.3f}]"
