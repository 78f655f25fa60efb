"""Memory: the phases of a training against the plan of `train --dry-run`; log-probabilities of a large vocabulary.

    python benchmarks/memory.py [--only plan|head] [--cases 60M wide] [--out FILE]

`plan`: each case is a model of a written configuration with random weights on a CPU, built like a training's
(learner, sampler, reference, optimizer state from a first small update). `rollout` samples a step's episodes to their
last token; `update` trains on a step of them. Each phase of each case is a separate process. Its figure is the peak
resident memory (VmHWM, as in ru_maxrss; reset before the phase, so that building does not count) above its start:
the process's memory after both phases of a model of 30,000 weights, that is the interpreter, torch and all libraries,
called `runtime` in the plan. Both sums are also given with it, as the dry run prints them.

`head`: forward and backward of the log-probabilities of 2,048 tokens over 151,936 words from hidden states of 64, for
AgentRL, the naive [T, V] log_softmax and, if installed (benchmarks/peers.txt), TRL's fused head; memory above the
process's start.

Writes benchmarks/results/memory.json; cases that were not run now keep their rows.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PROMPT, ANSWER = 64, 128
"""Tokens of every prompt, which a group shares, and of the tool's answer between the two turns of an episode."""
SIZES: dict[str, dict[str, int]] = {
    # Qwen3: hidden, layers, vocabulary, units of the feed-forward part, query heads, key-value heads, width of a head
    "3M": dict(hidden=192, layers=6, vocabulary=2048, inner=576, heads=6, kv=2, dim=32),
    "60M": dict(hidden=640, layers=10, vocabulary=8192, inner=2304, heads=10, kv=2, dim=64),
    "80M": dict(hidden=640, layers=10, vocabulary=32000, inner=2560, heads=10, kv=2, dim=64),
    "wide": dict(hidden=256, layers=4, vocabulary=151936, inner=768, heads=4, kv=2, dim=64),
}
TOY = dict(hidden=32, layers=1, vocabulary=512, inner=64, heads=2, kv=1, dim=16)
TOY_STEP = {"rollout.max_tokens": 256, "rollout.max_new_tokens": 16, "rollout.group_size": 2,
            "rollout.prompts_per_step": 2}  # fmt: skip
LORA = {"adapter.enabled": True, "adapter.r": 8, "adapter.alpha": 16}
Settings = Mapping[str, Any]
CASES: dict[str, tuple[str, Settings]] = {
    # name: size, settings besides DEFAULTS
    "3M, all weights": ("3M", {}),
    "3M, PPO": ("3M", {"algo.advantage": "gae"}),
    "3M, KL to a reference": ("3M", {"algo.kl.coef": 0.01}),
    "60M, all weights": ("60M", {"rollout.max_tokens": 1024, "rollout.prompts_per_step": 2}),
    "60M, LoRA": ("60M", {**LORA, "rollout.prompts_per_step": 2}),
    "60M, offloaded AdamW": ("60M", {"train.optimizer": "adamw_offload", "train.token_budget": 1024,
                                     "rollout.prompts_per_step": 1}),
    "80M, all weights": ("80M", {"rollout.max_tokens": 2048, "rollout.group_size": 2, "rollout.prompts_per_step": 1}),
    "wide, all weights": ("wide", {"rollout.prompts_per_step": 2, "train.token_budget": 2048}),
    "wide, LoRA": ("wide", {**LORA, "rollout.prompts_per_step": 2, "train.token_budget": 2048}),
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "model.device": "cpu", "rollout.group_size": 8, "rollout.prompts_per_step": 8, "rollout.max_tokens": 512,
    "train.token_budget": 4096, "train.schedule.warmup_steps": 0,
}  # fmt: skip
HEAD = {"rows": 2048, "vocabulary": 151936, "hidden": 64}
MiB = 2**20


# --- a case ----------------------------------------------------------------------------------------------------------


def config_of(settings: Settings, folder: str) -> Any:
    """The configuration of a case."""
    from agentrl_cli.config import Config

    sections: dict[str, dict[str, Any]] = {}
    for name, value in {**DEFAULTS, "model.name": folder, **settings}.items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = value
    return Config.model_validate(sections)


def write_shape(size: Mapping[str, int], folder: str) -> None:
    """A model's configuration, without weights, for the plan."""
    from transformers import Qwen3Config

    make: Any = Qwen3Config
    config = make(
        hidden_size=size["hidden"], intermediate_size=size["inner"], num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"], num_key_value_heads=size["kv"], head_dim=size["dim"],
        vocab_size=size["vocabulary"], tie_word_embeddings=True, max_position_embeddings=4096,
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)


class Training:
    """A training's objects in memory, created in the order of `agentrl train`."""

    def __init__(self, config: Any, folder: str) -> None:
        import copy

        from transformers import AutoConfig, AutoModelForCausalLM

        from agentrl_cli.learning.update import Learner
        from agentrl_cli.models.adapter import add_adapter
        from agentrl_cli.policies.load import make_policy
        from agentrl_cli.trainer.memory_plan import plan

        load: Any = AutoModelForCausalLM
        model = load.from_config(AutoConfig.from_pretrained(folder)).float()
        adapted = config.adapter.enabled
        if adapted:
            model = add_adapter(model, config.adapter, Path())
        self.config = config
        self.vocabulary = int(model.config.vocab_size)
        self.policy: Any = make_policy(model, config, "base", None, True)
        frozen = None
        if config.algo.kl.coef and not adapted:
            frozen = copy.deepcopy(model).requires_grad_(False).eval()
        checkpoint = plan(config, Path(folder)).checkpointing
        self.learner = Learner(model, config, frozen, checkpoint=checkpoint)
        self.learner.update(self.groups(2, 1, PROMPT + 16), 0)  # creates the optimizer's state
        self.publish()

    def publish(self) -> None:
        """Gives the sampler the new weights."""
        self.policy.set_version("next")

    def groups(self, size: int, count: int, length: int) -> list[list[Any]]:
        """Episodes of this length, one prompt per group."""
        import numpy as np

        from agentrl_cli.types import Episode, Origin, RewardPart, Tokens

        rng = np.random.default_rng(0)
        found = []
        for group in range(count):
            prompt = rng.integers(10, self.vocabulary, PROMPT)
            members = []
            for n in range(size):
                ids = np.concatenate(
                    [prompt, rng.integers(10, self.vocabulary, length - PROMPT)]
                ).astype(np.int32)
                origin = np.where(np.arange(length) < PROMPT, Origin.USER, Origin.MODEL).astype(
                    np.int8
                )
                part = (RewardPart("r", float(n % 2), primary=True),)
                tokens = Tokens.from_ids(ids, origin)
                members.append(Episode(f"{group}-{n}", f"t{group}", group_id=str(group), tokens=tokens,
                                       reward_parts=part))  # fmt: skip
            found.append(members)
        return found

    def update(self) -> None:
        """A whole step's update, on episodes of maximum length."""
        rollout = self.config.rollout
        asyncio.run(self.policy.rest())
        self.learner.update(
            self.groups(rollout.group_size, rollout.prompts_per_step, rollout.max_tokens), 1
        )

    def rollout(self) -> None:
        """All episodes of a step at once, each to its last token."""
        import numpy as np

        from agentrl_cli.types import Sampling

        rollout = self.config.rollout
        rng = np.random.default_rng(1)
        prompts = [
            rng.integers(10, self.vocabulary, PROMPT) for _ in range(rollout.prompts_per_step)
        ]

        async def episode(n: int) -> None:
            context = prompts[n // rollout.group_size].tolist()
            first = Sampling(seed=n, max_new_tokens=(rollout.max_tokens - PROMPT - ANSWER) // 2)
            turn = await self.policy.generate(str(n), context, first)
            context += [*turn.ids.tolist(), *rng.integers(10, self.vocabulary, ANSWER).tolist()]
            second = Sampling(seed=n, max_new_tokens=rollout.max_tokens - len(context))
            turn = await self.policy.generate(str(n), context, second)
            assert len(context) + len(turn.ids) == rollout.max_tokens

        async def sample() -> None:
            await asyncio.gather(
                *map(episode, range(rollout.prompts_per_step * rollout.group_size))
            )
            await self.policy.close()

        asyncio.run(sample())


def phase(case: str, which: str, folder: str) -> dict[str, float]:
    """One phase in this process: its peak resident bytes above the start, and the start."""
    from agentrl_cli.runtime import one_heap

    one_heap()  # as `agentrl train` does
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    settings = CASES[case][1]
    with tempfile.TemporaryDirectory() as toy:
        write_shape(TOY, toy)
        small = Training(config_of({**settings, **TOY_STEP}, toy), toy)
        small.update()
        small.rollout()
    del small
    trim()
    start = status("VmRSS")
    training = Training(config_of(settings, folder), folder)
    trim()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    getattr(training, which)()
    return {"start": start, "measured": status("VmHWM") - start}


def trim() -> None:
    """Return free memory to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def status(name: str) -> float:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * int(next(line for line in lines if line.startswith(name + ":")).split()[1])


def measure_plan(names: list[str]) -> list[dict[str, Any]]:
    """Both phases of every case: planned, measured, and the error."""
    from agentrl_cli.trainer.memory_plan import plan

    rows = []
    for name, (size, settings) in CASES.items():
        if names and not any(part in name for part in names):
            continue
        with tempfile.TemporaryDirectory() as folder:
            write_shape(SIZES[size], folder)
            planned = plan(config_of(settings, folder), Path(folder))
            for which in ("rollout", "update"):
                parts = dict(getattr(planned, which))
                runtime = parts.pop("runtime")
                found = child(name, which, folder)
                total, measured, start = sum(parts.values()), found["measured"], found["start"]
                whole = (total + runtime) / (measured + start) - 1
                rows.append({"case": name, "phase": which, "parameters": planned.parameters, "planned": total,
                             "measured": measured, "error": total / measured - 1, "runtime_planned": runtime,
                             "runtime_measured": start, "error_with_runtime": whole, "parts": parts})  # fmt: skip
                print(row_of(rows[-1]), flush=True)
                print(
                    "    " + ", ".join(f"{k} {v / MiB:.0f}" for k, v in sorted(parts.items())),
                    file=sys.stderr,
                )
    return rows


def row_of(one: Mapping[str, Any]) -> str:
    """A row of the table."""
    both = [one["planned"], one["measured"]]
    whole = [one["planned"] + one["runtime_planned"], one["measured"] + one["runtime_measured"]]
    cells = [
        one["case"],
        f"{one['parameters'] / 1e6:.0f} M",
        one["phase"],
        *(f"{b / MiB:,.0f}" for b in both),
    ]
    cells += [
        f"{one['error']:+.1%}",
        *(f"{b / MiB:,.0f}" for b in whole),
        f"{one['error_with_runtime']:+.1%}",
    ]
    return "| " + " | ".join(cells) + " |"


# --- the head --------------------------------------------------------------------------------------------------------


def head(name: str) -> dict[str, float]:
    """Peak bytes above the start of one forward and backward of the log-probabilities."""
    import resource

    import torch

    from agentrl_cli.learning.logprobs import head_logprobs

    torch.manual_seed(0)
    linear = torch.nn.Linear(HEAD["hidden"], HEAD["vocabulary"], bias=False).requires_grad_(False)
    hidden = torch.randn(HEAD["rows"], HEAD["hidden"], requires_grad=True)
    targets = torch.randint(HEAD["vocabulary"], (HEAD["rows"],))
    if name == "trl":
        utils = importlib.import_module("trl.trainer.utils")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if name == "trl":  # as its GRPOTrainer calls it, with the entropy
        given = (1.0, utils._CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs", "entropy"))
        logp = utils._ChunkedLogProbFunction.apply(hidden, linear.weight, None, targets, *given)[0]
    elif name == "naive":
        logp = torch.log_softmax(linear(hidden), -1).gather(-1, targets[:, None])[:, 0]
    else:
        logp, _ = head_logprobs(linear, hidden, targets)
    logp.mean().backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"bytes": (peak - before) * 1024.0, "logp": float(logp.detach().mean())}


def measure_head() -> dict[str, Any]:
    """AgentRL's head against the naive one."""
    ours, naive = child("ours", "head", ""), child("naive", "head", "")
    theirs = child("trl", "head", "") if find_spec("trl") else None
    assert all(abs(one["logp"] - naive["logp"]) < 1e-3 for one in (ours, theirs) if one is not None)
    print(f"head: ours {ours['bytes'] / MiB:.0f} MiB, naive {naive['bytes'] / MiB:.0f} MiB:"
          f" 1/{naive['bytes'] / ours['bytes']:.1f}")  # fmt: skip
    found = {
        **HEAD,
        "ours": ours["bytes"],
        "naive": naive["bytes"],
        "ratio": naive["bytes"] / ours["bytes"],
    }
    if theirs is None:
        return found
    print(f"TRL's fused head: {theirs['bytes'] / MiB:.0f} MiB")
    return {**found, "trl": theirs["bytes"], "trl_version": version("trl")}


# --- all -------------------------------------------------------------------------------------------------------------


def child(*arguments: str) -> dict[str, float]:
    """Runs this file in a separate process."""
    run = subprocess.run(
        [sys.executable, __file__, "--child", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise SystemExit(run.stderr)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["plan", "head"])
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[],
        help="cases whose name has one of these in it; default: all",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "memory.json")
    parser.add_argument(
        "--child", nargs=3, metavar=("NAME", "WHAT", "FOLDER"), help=argparse.SUPPRESS
    )
    given = parser.parse_args()
    if given.child:
        name, what, folder = given.child
        print(json.dumps(head(name) if what == "head" else phase(name, what, folder)))
        return
    result: dict[str, Any] = json.loads(given.out.read_text()) if given.out.is_file() else {}
    result.pop("update", None)
    if given.only != "head":
        known = {
            (one["case"], one["phase"]): one
            for one in [*result.get("plan", []), *measure_plan(given.cases)]
        }
        result["plan"] = [
            known[key]
            for name in CASES
            for key in ((name, "rollout"), (name, "update"))
            if key in known
        ]
        print("\n".join(["", *map(row_of, result["plan"])]))
    if given.only != "plan":
        result["head"] = measure_head()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
