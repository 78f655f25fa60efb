"""A small invented run for tests, screenshots and the benchmark of the screens: no model, no sandbox, no chance.

The texts are like those of `calc-task`; the numbers are made up but obey the rules (group-relative advantages, weights
only on sampled tokens, a few clipped ones).
"""

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from agentrl_cli.store import EvalRow, RunRow, Store
from agentrl_cli.types import (
    TOP_K,
    AgentState,
    Episode,
    Origin,
    Outcome,
    RewardPart,
    StopReason,
    Tokens,
    ToolCall,
    ToolResult,
    TrainSignals,
    Turn,
)
from agentrl_cli.types.plain import byte_of_char

SPECIALS = (
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
_WORD = re.compile(r"<\|?/?\w+\|?>| ?[^\W\d]+| ?\d|\n|[^\w\n]|\d")


class Words:
    """A byte-level vocabulary that grows with what is encoded: whole words, digits apart."""

    def __init__(self) -> None:
        self._char = {byte: char for char, byte in byte_of_char().items()}
        self.vocab = {self._char[byte]: byte for byte in range(256)}
        self.special = {name: 100_000 + n for n, name in enumerate(SPECIALS)}

    def encode(self, text: str) -> list[int]:
        ids = []
        for word in _WORD.findall(text):
            if word in self.special:
                ids.append(self.special[word])
                continue
            piece = "".join(self._char[byte] for byte in word.encode())
            ids.append(self.vocab.setdefault(piece, len(self.vocab)))
        return ids

    def json(self) -> str:
        added = [{"id": n, "content": name} for name, n in self.special.items()]
        return json.dumps(
            {
                "model": {"type": "BPE", "vocab": self.vocab},
                "added_tokens": added,
                "decoder": {"type": "ByteLevel"},
            }
        )


class Writer:
    def __init__(self, words: Words, seed: int) -> None:
        self.words = words
        self.rng = np.random.default_rng(seed)
        self.parts: list[Tokens] = []
        self.turns: list[Turn] = []
        self.at = 0

    def _add(self, turn: Turn, tokens: Tokens) -> None:
        self.turns.append(replace(turn, start=self.at, end=self.at + len(tokens)))
        self.parts.append(tokens)
        self.at += len(tokens)

    def given(
        self, role: str, text: str, origin: Origin, results: Sequence[ToolResult] = ()
    ) -> None:
        before = self.words.encode(f"<|im_start|>{'user' if role == 'tool' else role}\n")
        body = self.words.encode(
            f"<tool_response>\n{text}\n</tool_response>" if role == "tool" else text
        )
        after = self.words.encode(
            "<|im_end|>\n" + ("<|im_start|>assistant\n" if role != "system" else "")
        )
        kinds = [0] * len(before) + [int(origin)] * len(body) + [0] * len(after)
        message = {"role": role, "content": text}
        turn = Turn(len(self.turns), role, (message,), 0, 0, results=tuple(results), seconds=0.01)
        self._add(turn, Tokens.from_ids(before + body + after, np.asarray(kinds, np.int8)))

    def assistant(self, text: str, calls: Sequence[ToolCall] = (), *, stop: bool = True) -> None:
        """A sampled turn with invented log-probabilities."""
        ids = np.asarray(self.words.encode(text + ("<|im_end|>" if stop else "")), np.int32)
        n = len(ids)
        p = np.clip(self.rng.beta(4, 0.7, n), 0.03, 0.999).astype(np.float32)
        top_ids = np.full((n, TOP_K), -1, np.int32)
        top_p = np.full((n, TOP_K), np.nan, np.float32)
        for i in range(n):
            others = self.rng.integers(33, 126, TOP_K - 1)
            share = (1 - p[i]) * np.array([0.5, 0.25, 0.125, 0.06])
            rows = sorted(
                [(float(p[i]), int(ids[i])), *zip(share.tolist(), others.tolist(), strict=True)],
                reverse=True,
            )
            top_p[i], top_ids[i] = [r[0] for r in rows], [r[1] for r in rows]
        logp = np.log(p)
        entropy = (-p * logp - (1 - p) * np.log(1 - p + 1e-6)).astype(np.float32)
        origin = np.full(n, Origin.MODEL, np.int8)
        tokens = Tokens(ids, origin, logp, logp.copy(), entropy, top_ids, np.log(top_p))
        turn = Turn(
            len(self.turns),
            "assistant",
            ({"role": "assistant", "content": text},),
            0,
            0,
            calls=tuple(calls),
            stop_reason=StopReason.STOP if stop else StopReason.LENGTH,
            weights_version="step-119",
            seconds=1.9,
        )
        self._add(turn, tokens)

    def tokens(self) -> Tokens:
        return Tokens.concat(self.parts)


def call(
    name: str, arguments: dict[str, object] | None, raw: str = "", error: str | None = None
) -> ToolCall:
    text = raw or json.dumps({"name": name, "arguments": arguments})
    return ToolCall("call_0", name, arguments, text, error)


def episode(
    words: Words, sample: int, *, solved: bool, step: int = 120, run_id: str = "run7"
) -> Episode:
    """One attempt at the invented task: right, or with a comma in the number."""
    w = Writer(words, sample)
    w.given("system", "You can use tools.\n# Tools\n<tools>\ncalculator\n</tools>", Origin.SYSTEM)
    w.given("user", "12 boxes cost 4.5 each and shipping is 3.9. What is the total?", Origin.USER)
    number = "4.5" if solved else "4,5"
    first = call("calculator", {"expr": f"12 * {number} + 3.9"})
    w.assistant(
        f"I need the total price, so multiply 12 by {number} and then add the shipping.\n<tool_call>\n{first.raw}\n"
        "</tool_call>",
        [first],
    )
    if solved:
        w.given("tool", "57.9", Origin.TOOL, [ToolResult("57.9", seconds=0.002)])
        w.assistant("The total is 57.9")
    else:
        error = "SyntaxError: expected one number, got 4,5"
        w.given(
            "tool",
            error,
            Origin.TOOL,
            [ToolResult(error, error="bad_arguments", seconds=0.012, level="ns")],
        )
        w.assistant("The tool failed. I will guess the answer: 52.9", stop=sample % 2 == 0)
    parts = (
        RewardPart("correct", 1.0 if solved else 0.0, 1.0, primary=True, detail="expected 57.9"),
        RewardPart("format", 1.0 if solved else 0.5, 0.2),
        RewardPart("tool_err", 0.0 if solved else -1.0, 0.1),
    )
    return Episode(
        id=f"ep{step:04d}{sample:03d}",
        task_id="calc/0417",
        pack="calc-task",
        family="price",
        run_id=run_id,
        step=step,
        group_id=f"g{step}",
        sample=sample,
        kind="train",
        weights_version=f"step-{step - 1}",
        turns=tuple(w.turns),
        tokens=w.tokens(),
        reward_parts=parts,
        outcome=Outcome.SOLVED if solved else Outcome.FAILED,
        flags=() if solved else ("BADARG", "AFTERERR"),
        fact="trained",
        advantage=1.29 if solved else -0.77,
        started=1.7e9 + step * 40,
        ended=1.7e9 + step * 40 + 6,
    )


def signals_of(ep: Episode) -> TrainSignals:
    """Invented signals that obey the rules: NaN where untrained, weight zero where clipped."""
    n, mask = len(ep.tokens), ep.tokens.trained_mask
    rng = np.random.default_rng(ep.sample)
    nan = np.full(n, np.nan, np.float32)
    ratio = np.where(mask, np.exp(rng.normal(0, 0.08, n)), nan).astype(np.float32)
    advantage = np.where(mask, ep.advantage or 0.0, nan).astype(np.float32)
    clipped = (mask & (ratio > 1.15)).astype(np.int8)
    weight = np.where(
        mask, advantage * ratio * (clipped == 0) * rng.uniform(0.2, 1, n) / 219, nan
    ).astype(np.float32)
    gap = rng.normal(0, 0.02, n)
    logp_train = np.where(mask, ep.tokens.logp_policy + gap, nan).astype(np.float32)
    return TrainSignals(
        advantage,
        logp_train,
        ratio,
        clipped,
        weight,
        logp_ref=(logp_train + 0.1).astype(np.float32),
    )


def fill(path: Path, *, steps: int = 120, group: int = 8) -> str:
    words = Words()
    episodes = [
        episode(words, sample, solved=sample in (1, 4, 6), step=steps)
        for sample in range(1, group + 1)
    ]
    with Store.open(path) as store:
        store.tokenizers.add("words", words.json(), "", {})
        run = store.runs.add(
            RunRow(
                id="run7",
                name="grpo-07",
                model="tiny",
                pack="calc-task",
                total_steps=400,
                status="running",
                step=steps,
                config={"rollout": {"group_size": group, "prompts_per_step": 8}},
                tokenizer="words",
            )
        )
        for step in range(1, steps + 1):
            store.runs.add_step(run.id, step, metrics_of(step))
        for step in range(0, steps + 1, 20):
            rate = 0.1 + 0.34 * (1 - math.exp(-step / 50))
            store.runs.add_eval(
                EvalRow(
                    run.id, step, f"step-{step}", "test", 150, 4, rate, rate - 0.05, rate + 0.05
                )
            )
        for ep in episodes:
            store.episodes.finish(ep)
            store.signals.add(ep.id, signals_of(ep))
        store.runs.add_checkpoint(
            run.id, 100, "grpo-07/checkpoints/step_100", {"eval": 0.44}, "best"
        )
        store.journal.add_alert(
            run.id,
            "warn",
            "tool_errors",
            0.09,
            0.05,
            "tool error rate 3% to 9% since step 60 (BADARG)",
        )
        store.journal.add_log(run.id, "info", f"step {steps} reward 0.41 kl 0.021 len 812 37.1s")
        running = replace(
            episodes[2],
            id="ep_live",
            outcome=None,
            reward_parts=(),
            flags=(),
            step=steps + 1,
            group_id="g_next",
            fact="",
            advantage=None,
            ended=0.0,
            started=time.time() - 3,
        )
        store.episodes.start(running)
        for turn in running.turns[:3]:
            store.episodes.add_turn(running.id, turn, running.tokens.slice(turn.start, turn.end))
        store.live.set(running.id, AgentState.GENERATING, 3, "<think> Now add 3.9")
    return run.id


def metrics_of(step: int) -> dict[str, float]:
    rise = 1 - math.exp(-step / 60)
    return {
        "reward": 0.05 + 0.4 * rise + 0.04 * math.sin(step),
        "loss": 0.02 * math.cos(step / 3),
        "entropy": 0.9 - 0.5 * rise,
        "kl": 0.02 * rise,
        "grad_norm": 0.3 + 0.1 * math.sin(step / 5),
        "frac_reward_zero_std": 0.38,
        "tools/error_rate": 0.03 + 0.06 * rise,
        "completions/mean_length": 700 + 120 * math.sin(step / 9),
        "completions/clipped_ratio": 0.04,
        "clip_ratio/region_mean": 0.031,
        "rewards/correct/mean": 0.38 * rise,
        "rewards/format/mean": 0.46,
        "rewards/tool_err/mean": -0.09,
        "time/step": 37.1,
    }
