"""Do our numbers match TRL's? Advantages, losses and gradients on the same random batches, in float64.

    python -m venv /tmp/peers && /tmp/peers/bin/pip install -r benchmarks/peers.txt
    /tmp/peers/bin/python benchmarks/parity.py [--batches 20] [--only NAME]

TRL's side is TRL's own code: a real GRPOTrainer (RLOOTrainer for RLOO) is given rollouts, computes
advantages, old and reference log-probabilities and sampler corrections itself (`_generate_and_score_completions`), its
model is changed a little so that ratios differ from 1, and then its `_compute_loss` is called and differentiated.
AgentRL's side: a user's settings, the packed forward with shared prompts, the estimator, the loss and the
aggregation. Episodes have several lengths, with tool tokens between sampled ones.

Errors are relative: advantages to their largest, gradients to their norm. The loss, nearly 0 because advantages
cancel, to the same sum without signs: TRL's head works in float32, and so are both sides' advantages. Prints a table
and the known differences; writes benchmarks/results/parity.json. Exits with 1 if a pair is not within 1e-5.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentrl_cli.config import AlgoConfig, Config  # noqa: E402
from agentrl_cli.config.records import LearnerSettings  # noqa: E402
from agentrl_cli.learning.advantages import estimate, options  # noqa: E402  # works without an installation
from agentrl_cli.learning.estimator_inputs import AdvantageInput  # noqa: E402
from agentrl_cli.learning.forward import Logprobs, logprobs  # noqa: E402
from agentrl_cli.learning.losses import LossInput, Totals, policy_loss  # noqa: E402
from agentrl_cli.learning.objective import (  # noqa: E402
    KL,
    find_aggregation,
    loss_config,
    objective,
)
from agentrl_cli.learning.packing import Packed, Segment, pack  # noqa: E402

LIMIT = 1e-5
GROUPS, SIZE, LONGEST, VOCABULARY, TEMPERATURE = 3, 4, 16, 512, 0.7
WEIGHTS = (1.0, 0.5)
"""Of the two rewards."""


@dataclass(frozen=True)
class Pair:
    """A feature of both: TRL's settings and AgentRL's."""

    name: str
    trl: Mapping[str, Any]
    ours: Mapping[str, Any]
    what: tuple[str, ...] = ("advantage", "loss", "gradient")
    trainer: str = "grpo"
    sampler: bool = False
    """The sampler's log-probabilities are perturbed and corrected for."""


LOSS: Mapping[str, Any] = {"loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.2}
CLIP: Mapping[str, Any] = {"aggregation": "seq_mean", "clip_low": 0.2, "clip_high": 0.2}
TOKENS: Mapping[str, Any] = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}

PLAIN_KL: Mapping[str, Any] = {"beta": 0.04, "use_bias_correction_kl": False}


def _sampler(mode: str, correction: str, cap: float, floor: float | None = None) -> Pair:
    trl = {
        **TOKENS,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": cap,
    }
    ours = {"off_policy": {"correction": correction, "cap": cap, "floor": floor}}
    name = f"correction {mode}" + ", two bounds" * (floor is not None)
    return Pair(name, {**trl, "vllm_importance_sampling_clip_min": floor}, ours, sampler=True)


PAIRS = (
    Pair(
        "advantage: scale_rewards=group",
        {**LOSS, "scale_rewards": "group"},
        {**CLIP, "advantage": "grpo"},
    ),
    Pair(
        "advantage: scale_rewards=batch",
        {**LOSS, "scale_rewards": "batch"},
        {**CLIP, "advantage": "batch"},
    ),
    Pair(
        "advantage: scale_rewards=none",
        {**LOSS, "scale_rewards": "none"},
        {**CLIP, "advantage": "dr_grpo"},
    ),
    Pair(
        "advantage: normalize_then_sum (GDPO)",
        {**LOSS, "multi_objective_aggregation": "normalize_then_sum"},
        {**CLIP, "advantage": "gdpo"},
    ),
    Pair(
        "advantage: RLOO",
        {"normalize_advantages": False, "beta": 0.0},
        {"advantage": "rloo"},
        ("advantage",),
        "rloo",
    ),
    Pair(
        "advantage: RLOO, k1 KL in the reward",
        {"normalize_advantages": False, "beta": 0.05},
        {"advantage": "rloo", "kl": {"coef": 0.05, "estimate": "k1", "where": "reward"}},
        ("advantage",),
        "rloo",
    ),
    Pair("loss: grpo", LOSS, CLIP),
    Pair("loss: grpo, two bounds", {**LOSS, "epsilon_high": 0.28}, {**CLIP, "clip_high": 0.28}),
    Pair("loss: grpo, delta", {**LOSS, "delta": 1.25}, {**CLIP, "clip_dual": 1.25}),
    Pair("loss: bnpo", {**TOKENS, "loss_type": "bnpo"}, {"aggregation": "token_mean"}),
    Pair("loss: dapo", TOKENS, {"loss": "dapo"}),
    Pair(
        "loss: dr_grpo",
        {**TOKENS, "loss_type": "dr_grpo", "scale_rewards": "none"},
        {"advantage": "dr_grpo"},
    ),
    Pair(
        "loss: cispo",
        {"loss_type": "cispo", "epsilon_high": 1.2},
        {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.2},
    ),
    Pair("loss: sapo", {"loss_type": "sapo"}, {"loss": "sapo"}),
    Pair(
        "loss: sequence level (GSPO)",
        {**LOSS, "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03},
        {"loss": "gspo", "clip_low": 0.02, "clip_high": 0.03},
    ),
    Pair(
        "term: KL, weighed with the ratio",
        {**LOSS, "beta": 0.04},
        {**CLIP, "kl": {"coef": 0.04, "unbiased": True}},
    ),
    Pair("term: KL as it is", {**LOSS, **PLAIN_KL}, {**CLIP, "kl": 0.04}),
    Pair("term: KL as it is, token mean", {**TOKENS, **PLAIN_KL}, {"kl": 0.04}),
    Pair(
        "term: entropy bonus, token mean", {**TOKENS, "entropy_coef": 0.05}, {"entropy_coef": 0.05}
    ),
    _sampler("token_truncate", "tis", 1.5),
    _sampler("token_mask", "mis", 1.5),
    _sampler("sequence_truncate", "tis_sequence", 1.5),
    _sampler("sequence_mask", "mis_sequence", 1.5),
    _sampler("token_truncate", "tis", 1.5, 0.8),
    _sampler("token_mask", "mis", 1.5, 0.8),
    _sampler("sequence_truncate", "tis_sequence", 1.5, 0.8),
    _sampler("sequence_mask", "mis_sequence", 1.5, 0.8),
)

DIFFERENCES = (
    ("entropy bonus with loss_type grpo, sapo, dr_grpo", "TRL averages entropy over tokens for every loss; ours"
     " uses the loss's own aggregation, so that the bonus and the policy term weigh an episode alike."),
    ("cispo", "TRL bounds the ratio above only, and epsilon_high is the bound itself; ours bounds both sides at"
     " 1 - clip_low and 1 + clip_high (clip_low=1 and clip_high=epsilon_high-1 give TRL's)."),
    ("loss_type grpo and sapo under gradient accumulation", "TRL averages the means of micro-batches; ours divides by"
     " the mini-batch's own totals, so its gradient does not depend on how micro-batches are cut."),
    ("RLOO's loss", "TRL clips the product of a sequence's ratios; ours uses any loss with RLOO's"
     " advantage, per token by default. TRL can also normalise RLOO advantages over the batch; ours never does."),
    ("KL", "TRL weighs it with the ratio by default (use_bias_correction_kl), ours with kl_unbiased;"
     " only ours subtracts it from the reward for every estimator, and as k1, k2 or k3."),
    ("luspo, vespo", "not in ours."),
    ("off_policy_mask_threshold, top_entropy_quantile", "algo.off_policy.mask and algo.entropy.share in ours; not"
     " compared here, tested by hand-computed numbers in tests/learning/test_masks.py."),
    ("pass_at_k, OPO, ReMax, REINFORCE++, GAE, turn_returns, mt_grpo, GiGPO, clip-cov, kl-cov, k1, k2", "not in TRL's"
     " GRPOTrainer: tested by hand-computed numbers in tests/learning/test_advantages.py and test_losses.py."),
    ("group of one, groups of equal rewards", "both give 0, but ours then skips and reports the episodes."),
)  # fmt: skip
"""Features that differ, and why."""


@dataclass
class Rollouts:
    """The input of both sides: GROUPS × SIZE episodes, with prompts and rewards."""

    prompts: list[list[int]]
    completions: list[list[int]]
    masks: list[list[int]]
    rewards: np.ndarray[Any, np.dtype[np.float64]]
    noise: list[list[float]]
    """Perturbation of the sampler's log-probabilities."""
    segments: list[list[Segment]] = field(default_factory=list)

    @classmethod
    def random(cls, rng: np.random.Generator) -> Rollouts:
        made = cls([], [], [], rng.normal(size=(GROUPS * SIZE, 2)), [])
        for _ in range(GROUPS):
            prompt = rng.integers(5, VOCABULARY, int(rng.integers(3, 9))).tolist()
            group = []
            for _ in range(SIZE):
                n = int(rng.integers(2, LONGEST + 1))
                said = rng.integers(5, VOCABULARY, n).tolist()
                mask = (rng.random(n) < 0.7).astype(int)
                mask[[0, -1]] = 1
                made.prompts.append(prompt)
                made.completions.append(said)
                made.masks.append(mask.tolist())
                made.noise.append(rng.normal(scale=0.3, size=n).tolist())
                ids = np.array([*prompt, *said], np.int32)
                group.append(Segment(ids, np.array([*[0] * len(prompt), *mask], bool)))
            made.segments.append(group)
        return made


# --- TRL -------------------------------------------------------------------------------------------------------------


class Peer:
    """A TRL trainer with these settings and given rollouts."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import (
            GRPOConfig,
            GRPOTrainer,
            RLOOConfig,
            RLOOTrainer,
        )

        kinds: dict[str, Any] = {
            "grpo": (GRPOConfig, GRPOTrainer),
            "rloo": (RLOOConfig, RLOOTrainer),
        }
        make_config, make_trainer = kinds[pair.trainer]
        args = make_config(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=GROUPS * SIZE,
            num_generations=SIZE,
            num_iterations=2,
            gradient_checkpointing=False,
            max_completion_length=LONGEST,
            temperature=TEMPERATURE,
            reward_weights=list(WEIGHTS),
            report_to="none",
            use_cpu=True,
            bf16=False,
            **pair.trl,
        )
        self.given: Rollouts | None = None
        self.kind = pair.trainer
        self.trainer = make_trainer(
            model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64),
            args=args,
            reward_funcs=[self._reward(0), self._reward(1)],
            train_dataset=Dataset.from_list([{"prompt": "x"}] * GROUPS * SIZE),
            processing_class=AutoTokenizer.from_pretrained(
                ROOT / "agentrl_cli" / "models" / "tiny-agent"
            ),
        )
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer._generate = self._generate
        self.trainer.use_vllm = pair.sampler
        self.model = self.trainer.model
        if self.trainer.ref_model is not None:
            move(self.trainer.ref_model.double(), 0.02, 5)
        self.start = copy.deepcopy(self.model.state_dict())

    def _reward(self, column: int) -> Any:
        def reward(**_: Any) -> list[float]:
            assert self.given is not None
            return [float(value) for value in self.given.rewards[:, column]]

        reward.__name__ = f"reward_{column}"
        return reward

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        g = self.given
        assert g is not None
        if self.kind == "rloo":
            return g.prompts, g.completions, ["y"] * len(prompts)
        sampled = self.sampled if self.trainer.use_vllm else None
        return g.prompts, g.completions, g.masks, ["y"] * len(prompts), sampled, {}, None, []

    def inputs(self, given: Rollouts, sampled: list[list[float]]) -> dict[str, Any]:
        """TRL's own scoring of the rollouts, with the weights that sampled them."""
        self.given, self.sampled = given, sampled
        self.model.load_state_dict(self.start)
        self.model.train()
        found: dict[str, Any] = self.trainer._generate_and_score_completions(
            [{"prompt": "x"}] * len(given.prompts)
        )
        return found

    def loss(self, inputs: dict[str, Any]) -> tuple[float, Tensor]:
        """Its loss and the gradient of all weights, at the current weights."""
        self.model.zero_grad(set_to_none=True)
        loss = self.trainer._compute_loss(self.model, inputs)
        loss.backward()
        return float(loss.detach()), flat_gradient(self.model)


# --- ours ------------------------------------------------------------------------------------------------------------


@dataclass
class Ours:
    """AgentRL's scoring of the same rollouts, with the weights that sampled them."""

    algo: AlgoConfig
    packed: Packed
    old: Tensor
    ref: Tensor | None
    advantages: list[Any]

    @classmethod
    def of(cls, algo: AlgoConfig, given: Rollouts, model: Any, reference: Any) -> Ours:
        packed = pack(given.segments)
        with torch.no_grad():
            old = forward(model, packed).logp
            ref = forward(reference, packed).logp if algo.kl.coef else None
        lengths = np.array([sum(mask) for mask in given.masks])
        fields = options(algo)
        if algo.kl.where == "reward":
            assert ref is not None
            fields["token_penalty"] = tuple(
                _by_episode(packed, (algo.kl.coef * KL[algo.kl.estimate](old, ref)).numpy())
            )
        x = AdvantageInput(
            rewards=given.rewards @ np.array(WEIGHTS),
            groups=np.repeat(np.arange(GROUPS), SIZE),
            lengths=lengths,
            parts=given.rewards,
            part_weights=np.array(WEIGHTS),
            **fields,
        )
        return cls(algo, packed, old, ref, estimate(algo, x))

    def loss(self, model: Any, given: Rollouts) -> tuple[float, Tensor, float]:
        """The loss, its gradient of all weights at the current weights, and the sum of coefficient · |advantage|."""
        config = Config(algo=self.algo)
        config.rollout.temperature = TEMPERATURE
        out = forward(model, self.packed)
        off = np.concatenate(
            [np.array(n)[np.array(m, bool)] for n, m in zip(given.noise, given.masks, strict=True)]
        )
        segment = torch.from_numpy(self.packed.episode)
        x = LossInput(
            logp=out.logp,
            old=self.old,
            advantage=torch.from_numpy(np.concatenate(self.advantages).astype(np.float64)),
            segment=segment,
            entropy=out.entropy,
            ref=self.ref,
            sampled=self.old + torch.from_numpy(off),
        )
        model.zero_grad(set_to_none=True)
        totals = Totals.of(segment, LONGEST)
        found = objective(
            x,
            loss_config(LearnerSettings.of(config)),
            totals,
            policy_loss(self.algo.loss.name),
            find_aggregation(self.algo),
        )
        found.loss.backward()  # type: ignore[no-untyped-call]
        scale = float((found.coefficient * x.advantage.abs()).sum())
        return float(found.loss.detach()), flat_gradient(model), scale


def forward(model: Any, packed: Packed) -> Logprobs:
    return logprobs(model, packed, temperature=TEMPERATURE)


# --- both ------------------------------------------------------------------------------------------------------------


def flat_gradient(model: Any) -> Tensor:
    return torch.cat(
        [
            (p.grad if p.grad is not None else torch.zeros_like(p)).flatten()
            for p in model.parameters()
        ]
    )


def move(model: Any, scale: float, seed: int) -> None:
    """Changes the weights a little, so that ratios, KL and clipping count."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += scale * torch.randn_like(tensor)


def _by_episode(packed: Packed, flat: Any) -> list[Any]:
    """Split numbers of trained tokens into those of each episode."""
    return [flat[packed.episode == number] for number in range(GROUPS * SIZE)]


def sampled_logps(ours: Ours, given: Rollouts) -> list[list[float]]:
    """The sampler's log-probabilities per completion token; arbitrary for tokens that are not sampled."""
    out = []
    for logps, mask, noise in zip(
        _by_episode(ours.packed, ours.old.numpy()), given.masks, given.noise, strict=True
    ):
        row = np.zeros(len(mask))
        row[np.array(mask, bool)] = logps + np.array(noise)[np.array(mask, bool)]
        out.append(row.tolist())
    return out


def compare(pair: Pair, folder: Path, batches: int) -> dict[str, Any]:
    """The largest relative error of each number over random batches."""
    peer = Peer(pair, folder)
    algo = AlgoConfig(**pair.ours)
    worst = dict.fromkeys(pair.what, 0.0)
    clipped = 0.0
    for seed in range(batches):
        given = Rollouts.random(np.random.default_rng(seed))
        if pair.trainer == "rloo":  # it has no tool tokens
            given.masks = [[1] * len(mask) for mask in given.masks]
            given.segments = [
                [Segment(s.ids, _after(s)) for s in group] for group in given.segments
            ]
        peer.model.load_state_dict(peer.start)
        ours = Ours.of(algo, given, peer.model, peer.trainer.ref_model)
        inputs = peer.inputs(given, sampled_logps(ours, given))
        theirs = inputs["advantages"].double()
        mine = torch.tensor([float(a[0]) for a in ours.advantages], dtype=torch.float64)
        worst["advantage"] = max(
            worst["advantage"], float((theirs - mine).abs().max() / theirs.abs().max())
        )
        if "loss" not in pair.what:
            continue
        move(peer.model, 0.02, 100 + seed)
        loss, gradient = peer.loss(inputs)
        own_loss, own_gradient, scale = ours.loss(peer.model, given)
        worst["loss"] = max(worst["loss"], abs(loss - own_loss) / scale)
        worst["gradient"] = max(
            worst["gradient"], float((gradient - own_gradient).norm() / gradient.norm())
        )
        ratio = (forward(peer.model, ours.packed).logp.detach() - ours.old).exp()
        clipped += float(((ratio > 1.28) | (ratio < 0.8)).double().mean()) / batches
    passed = all(error < LIMIT for error in worst.values())
    facts = {"pair": pair.name, "batches": batches, "trl": dict(pair.trl), "ours": dict(pair.ours)}
    return {**facts, "error": worst, "passed": passed, "ratios_beyond_0.8_1.28": clipped}


def _after(segment: Segment) -> Any:
    """Every token from the first trained one on."""
    return np.arange(len(segment.ids)) >= int(np.flatnonzero(segment.trained)[0])


def write_model(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    small: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **small, **heads)).double().save_pretrained(
        folder
    )


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: the largest relative error of each pair."""
    lines = ["| pair | advantage | loss | gradient | |", "| --- | --- | --- | --- | --- |"]
    for one in results:
        cells = [
            f"{one['error'][k]:.1e}" if k in one["error"] else ""
            for k in ("advantage", "loss", "gradient")
        ]
        lines.append(
            f"| {one['pair']} | {' | '.join(cells)} | {'ok' if one['passed'] else 'DIFFERS'} |"
        )
    return "\n".join(lines)


def merged(out: Path, results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The new results, and the file's results of the other pairs."""
    known = json.loads(out.read_text(encoding="utf-8"))["results"] if out.is_file() else []
    found = {one["pair"]: one for one in [*known, *results]}
    return [found[pair.name] for pair in PAIRS if pair.name in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--only", help="pairs whose name has this in it; the file keeps the others")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "parity.json")
    args = parser.parse_args()
    try:
        peer = version("trl")
    except ModuleNotFoundError:
        print("TRL is not installed here; see the head of this file.", file=sys.stderr)
        return 3
    results = []
    with tempfile.TemporaryDirectory(prefix="agentrl-parity-") as temporary:
        folder = Path(temporary)
        write_model(folder / "model")
        for pair in PAIRS:
            if args.only is None or args.only in pair.name:
                results.append(compare(pair, folder, args.batches))
                print(table(results[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(results))
    print(
        "\n".join(["", "Not the same in both:", *(f"- {what}: {why}" for what, why in DIFFERENCES)])
    )
    facts = {
        "trl": peer,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "limit": LIMIT,
    }
    differ = [{"what": what, "why": why} for what, why in DIFFERENCES]
    whole = {
        **facts,
        "at": time.strftime("%Y-%m-%d"),
        "results": merged(args.out, results),
        "differences": differ,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0 if all(one["passed"] for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
