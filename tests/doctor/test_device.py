"""`agentrl doctor --gpu`: a device beside transformers, what is kept of it, and what then samples and updates."""

import json
import sys
from pathlib import Path

import pytest
import torch

from agentrl_cli.config import Config
from agentrl_cli.config.records import PolicySettings
from agentrl_cli.doctor.device_trial import try_part
from agentrl_cli.errors import EnvironmentProblem
from agentrl_cli.inference.remembered import recall
from agentrl_cli.learning.forward import avoid, way_of
from agentrl_cli.policies.device_check import PARTS, Part, Verdict, keep, try_device
from agentrl_cli.policies.load import runner_for
from agentrl_cli.types import Sampling
from tests.helpers.cli import Cli
from tests.helpers.local import policy_of, tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize("part", ["paged", "packed"])
def test_a_trial_of_this_cpu(part: str) -> None:
    """Prompts in pieces, groups, later turns, top-p; gradients with and without recomputed activations."""
    found = try_part(part, CPU, 0.0)
    assert not found["problem"] and found["worst"] < 1e-4
    assert part == "packed" or found["tokens_per_second"] > 0


def test_what_a_device_without_numbers_fails_at() -> None:
    assert "meta" in try_part("paged", torch.device("meta"), 0.0)["problem"]


def test_a_fault_of_one_part_is_its_own(tmp_path: Path) -> None:
    """The process that runs `paged` dies; another tries what is left, and the verdict is kept."""
    program = tmp_path / "trial.py"
    program.write_text(
        "import json, os, sys\n"
        "print(json.dumps({'device': 'H1000', 'driver': '1.2'}), flush=True)\n"
        "for part in sys.argv[3:]:\n"
        "    if part == 'paged': os.write(2, b'CUDA error: an illegal memory access'); os._exit(134)\n"
        "    print(json.dumps({'part': part, 'problem': 'by 0.5' if part == 'packed' else ''}), flush=True)\n"
    )
    verdict = try_device("cuda:0", 1.0, program=[sys.executable, str(program)])
    assert (
        tuple(sorted(verdict.parts)) == tuple(sorted(PARTS))
        and verdict.identity["device"] == "H1000"
    )
    assert "illegal memory access" in verdict.problem("paged") and not verdict.problem("fallback")
    assert list(verdict.ways) == ["packed"]
    keep(verdict)
    kept = recall("devices", "H1000 / 1.2")
    assert kept is not None and json.loads(kept)["parts"]["packed"]["problem"] == "by 0.5"
    nothing = tmp_path / "nothing.py"
    nothing.write_text("raise SystemExit('the driver is too old')")
    with pytest.raises(EnvironmentProblem, match="the driver is too old"):
        try_device("cuda:0", 1.0, program=[sys.executable, str(nothing)])


async def test_what_failed_is_not_used() -> None:
    """The fallback samples with the reason in the engine line; episodes are padded; nothing left ends the command."""
    bad = {
        name: Part(name, problem="log-probabilities differ by 2")
        for name in ("paged", "packed", "graphs")
    }
    verdict, config = Verdict({}, bad), Config()
    policy = policy_of(
        tiny(), runner=runner_for(PolicySettings.of(config), torch.device("cuda"), verdict)
    )
    assert (
        policy.engine == "fallback"
        and "`agentrl doctor --gpu` found on this GPU" in policy.describe()
    )
    said = await policy.generate("a", [7, 8, 9], Sampling(max_new_tokens=2))
    assert len(said.ids) == 2
    await policy.close()
    model = tiny()
    avoid(model, verdict.ways)
    assert way_of(model) == "padded"
    auto = PolicySettings.of(Config.model_validate({"rollout": {"cuda_graphs": "auto"}}))
    assert runner_for(auto, torch.device("cuda"), Verdict()) is not None
    assert runner_for(auto, torch.device("cuda"), Verdict({}, {"graphs": bad["graphs"]})) is None
    assert runner_for(PolicySettings.of(Config()), torch.device("cuda"), Verdict()) is None, (
        "graphs are off until a project asks"
    )
    with pytest.raises(EnvironmentProblem, match="No engine"):
        Verdict({}, {**bad, "fallback": Part("fallback", problem="too")}).require_engine()
    full = Verdict({}, {"paged": Part("paged", problem="CUDA out of memory")})
    assert full.starved and not full.problem("paged"), "another program had the memory"


def test_the_command(cli: Cli) -> None:
    cli("doctor", "--device", "cpu", code=2)
    unknown = "Unknown model.device 'nonsense'"
    cli("doctor", "--gpu", "--device", "nonsense", "--json", code=3, said=unknown)
