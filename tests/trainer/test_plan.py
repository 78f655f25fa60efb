"""The memory plan: numbers from shapes, and a refusal that says what to change; `--fit`, `--gpu-memory`, `--preset`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl_cli.config import Config, load_config
from agentrl_cli.config.presets import preset_file, preset_names
from agentrl_cli.config.records import MemorySettings, PolicySettings
from agentrl_cli.inference.memory import kv_positions, live_rows
from agentrl_cli.models.adapter import add_adapter
from agentrl_cli.paths import bundled_model
from agentrl_cli.trainer.memory_fit import changes, fit
from agentrl_cli.trainer.memory_plan import Plan, plan, typical_tokens, update_memory
from benchmarks.gpu_memory import GPUS, PAGE, cell, folders, settings
from tests.helpers.cli import Cli


def test_the_parts_of_the_bundled_model_by_hand() -> None:
    found = plan(Config(), bundled_model())
    # 768 × 160 embeddings (tied) + 6 layers of 4 × 160² attention, 3 × 160 × 432 MLP, norms; 64 rows × 1,024 positions.
    layer = 4 * 160 * 160 + 3 * 160 * 432 + 2 * 160 + 2 * 32
    assert found.parameters == 768 * 160 + 6 * layer + 160
    assert found.rollout["weights"] == found.parameters * 4
    # one row more than there are, and a twelfth more while the KV cache grows: 6 layers, keys after values
    assert found.rollout["keys and values"] == pytest.approx(65 * 1024 * 6 * 2 * 160 * 4 * 13 / 12)
    assert found.update["optimizer"] == found.trainable * 8
    assert found.fits and not found.advice()


def test_what_does_not_fit_is_refused_with_the_largest_part_first() -> None:
    found = replace(
        plan(
            Config.model_validate({"rollout": {"concurrency": 64, "max_tokens": 1024}}),
            bundled_model(),
        ),
        available=1.0,
    )
    assert not found.fits
    assert "rollout.concurrency" in found.advice()[0] or "token_budget" in found.advice()[0]


@pytest.mark.parametrize(
    ("kl", "adapter", "size"),
    [
        ({"coef": 0.0}, {}, ""),
        ({"coef": 0.1}, {}, "parameters"),
        ({"coef": 0.1}, {"enabled": True}, ""),  # without the adapter the model is the reference
        ({"coef": 0.1}, {"enabled": True, "path": "begun"}, "parameters"),
        ({"coef": 0.1, "ref_ema": 0.5}, {}, "parameters"),
        ({"coef": 0.1, "ref_ema": 0.5}, {"enabled": True}, "trainable"),
    ],
)
def test_a_reference_is_counted_where_there_is_one(
    kl: dict[str, float], adapter: dict[str, Any], size: str
) -> None:
    model = {"dtype": "float32"}
    config = Config.model_validate({"algo": {"kl": kl}, "adapter": adapter, "model": model})
    found = plan(config, bundled_model())
    wanted = 4 * getattr(found, size) if size else None
    assert found.update.get("reference") == wanted


def test_activations_are_recomputed_as_it_is_set_and_where_they_do_not_fit() -> None:
    def of(choice: str, budget: int = 4096, held: float = 0.0) -> Plan:
        return plan(
            Config.model_validate({"train": {"checkpointing": choice, "token_budget": budget}}),
            folder,
            held,
        )

    folder, huge = bundled_model(), 10**9
    kept, again = of("off"), of("on")
    each = (9 * 160 + 4 * 160) * 4 + (3 * 160 + 2 * 160 + 4 * 432) * 4
    passing = (
        4 * (432 + 160) + 4 * 160
    ) * 4  # in one layer's backward pass; before the first and after the last
    assert kept.update["activations"] == 4096 * (6 * each + passing)
    assert again.update["activations"] == 4096 * (6 * 160 * 4 + each + passing)
    assert kept.update["head's gradient"] == 768 * 160 * 4 and "optimizer's step" not in kept.update
    assert again.checkpointing and not kept.checkpointing and not of("auto").checkpointing
    assert of("auto", huge).checkpointing and not of("off", huge).checkpointing
    assert not of("auto", huge, held=1e18).checkpointing, "what is loaded already counts as room"


def test_a_row_beyond_the_memory_for_its_activations_recomputes_them() -> None:
    def of(choice: str) -> Plan:
        settings = Config.model_validate({"train": {"checkpointing": choice, "token_budget": 4096}})
        return plan(settings, bundled_model(), gpu_bytes=2**30)

    auto, kept, again = of("auto"), of("off"), of("on")
    assert 4096 <= auto.kept_tokens == kept.kept_tokens == kept.row_tokens
    assert auto.row_tokens == again.row_tokens == again.kept_tokens > 2 * kept.row_tokens


def test_the_estimated_time_is_that_of_the_tokens_that_turns_can_have() -> None:
    for limits, wanted in (
        ({"max_turns": 4, "max_new_tokens": 40, "max_tokens": 8192}, 2 * 4 * 40),
        ({"max_turns": 4, "max_new_tokens": 96, "max_tokens": 768}, 768 / 4),
    ):
        config = MemorySettings.of(Config.model_validate({"rollout": limits}))
        assert typical_tokens(config) == wanted


def test_a_small_model_is_not_planned_for_before_training() -> None:
    layer = torch.nn.Linear(4, 4)
    for name, wanted in (("auto", False), ("on", True), ("off", False)):
        config = Config.model_validate({"train": {"checkpointing": name}})
        found = update_memory(MemorySettings.of(config), bundled_model(), layer)
        assert (found["checkpoint"], found["aside"]) == (wanted, False)


def test_optimizer_state_by_name() -> None:
    def found(name: str) -> Plan:
        return plan(Config.model_validate({"train": {"optimizer": name}}), bundled_model())

    each = {name: found(name) for name in ("adamw", "adamw8bit", "adamw_offload", "muon")}
    matrices = 6 * (4 * 160 * 160 + 3 * 160 * 432)
    muon = 4 * matrices + 8 * (each.pop("muon").trainable - matrices)
    assert [one.update["optimizer"] / one.trainable for one in each.values()] == [8, 2, 12]
    assert found("muon").update["optimizer"] == muon


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return folders(tmp_path_factory.mktemp("shapes"))


@pytest.fixture
def half_billion(shapes: dict[str, Path]) -> Path:
    """Qwen2-0.5B's configuration, without weights."""
    return shapes["Qwen2-0.5B"]


def sections(**more: Any) -> Config:
    base: dict[str, Any] = {
        "model": {"device": "cpu", "dtype": "bfloat16"},
        "adapter": {"enabled": True, "r": 8, "alpha": 16},
        "rollout": {"group_size": 8, "prompts_per_step": 4, "max_tokens": 2048},
        "train": {"token_budget": 2048, "checkpointing": "on"},
    }
    for name, values in more.items():
        base[name] = {**base.get(name, {}), **values}
    return Config.model_validate(base)


def test_half_a_billion_weights_under_an_adapter_fit_a_small_gpu(half_billion: Path) -> None:
    """4.4 M of 494 M trained, episodes of 2,048 tokens: each phase at most 2.2 GB, the runtime's half GB included."""
    found = plan(sections(), half_billion)
    assert (found.parameters, found.trainable) == (494_032_768, 4_399_104)
    assert sum(found.update.values()) < 2.2e9
    # 32 sequences of 2,048 tokens at once, and one more for prefixes: of 24 layers, 2 heads of 64, in 16 bits
    assert found.rollout["keys and values"] == pytest.approx(33 * 2048 * 24 * 2 * 128 * 2 * 49 / 48)
    assert found.rollout["optimizer"] == found.trainable * 8, (
        "it stays where it is while episodes are sampled"
    )
    # 2^24 / (3 · 4,864 · 2) tokens: beside 6 · 896 in 16 bits two tensors of 4,864 in 16 bits and two in 32; a mask
    assert found.rollout["prefill"] == 574 * (
        4864 * (2 * 2 + 2 * 4) + 896 * 6 * 2 + (7 + 2) * 2048 * 2
    )
    assert "logits" not in found.rollout, "tokens are drawn when the prompts are done"
    bare = plan(sections(adapter={"enabled": False}), half_billion)
    # without one the draw is the larger: of 13 rows at once five float32, and the logits of all 32
    assert bare.rollout["logits"] == (20 * 13 + 2 * 32) * 151936 and "prefill" not in bare.rollout
    bounded = plan(sections(rollout={"memory": "480MiB"}), half_billion)
    assert sum(bounded.rollout.values()) < 2.2e9


def test_both_figures_of_a_small_gpu(half_billion: Path) -> None:
    gpu_bytes = 4e9
    found = plan(sections(), half_billion, gpu_bytes=gpu_bytes)
    assert (
        found.fits
        and found.aside
        and "optimizer" not in found.rollout
        and "optimizer" in found.update
    )
    for name, phase in (("rollout", found.rollout), ("update", found.update)):
        assert phase["runtime"] == 2**29 and found.allocated[name] == pytest.approx(
            sum(phase.values()) - 2**29
        )
    assert max(found.allocated.values()) < 2.2e9, (
        "what max_memory_allocated reports in either phase"
    )
    assert sum(found.update.values()) < 2.2e9 < sum(found.rollout.values()), (
        "rows of 2,048 sampled tokens do not"
    )
    longer = plan(sections(rollout={"response_tokens": 1280}), half_billion, gpu_bytes=gpu_bytes)
    assert sum(longer.rollout.values()) < 2.2e9, (
        "prompts of 768 tokens kept once, of episodes of 2,048"
    )
    full = plan(sections(adapter={"enabled": False}), half_billion, gpu_bytes=80e9)
    assert not full.aside, "there the update is the larger phase: nothing would be won"


def test_captured_steps_stay_with_keys_and_values(half_billion: Path) -> None:
    found = plan(sections(rollout={"cuda_graphs": "auto"}), half_billion, gpu_bytes=80e9)
    # 64 rows: logits in 16 bits, and 32 graphs of a guessed 2 MiB
    wanted = 64 * 151936 * 2 + 32 * 2**21
    assert found.rollout["captured steps"] == found.update["captured steps"] == wanted
    assert found.rollout["keys and values"] == found.update["keys and values"] > 0
    for none in (
        plan(sections(), half_billion, gpu_bytes=80e9),
        plan(sections(rollout={"cuda_graphs": "auto"}), half_billion),
    ):
        assert (
            "captured steps" not in (*none.rollout, *none.update)
            and "keys and values" not in none.update
        )


def test_quantised_weights_are_counted_as_they_are_kept(half_billion: Path) -> None:
    linear = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)
    rest, adapter = (494_032_768 - linear) * 2, 4_399_104 * 4
    for bits, each in (("none", 2.0), ("8bit", 1.01), ("4bit", 0.516)):
        found = plan(sections(model={"quantization": bits}), half_billion)
        assert (
            found.rollout["weights"]
            == found.update["weights"]
            == pytest.approx(rest + linear * each + adapter)
        )


def test_the_optimizers_step_counts_where_it_takes_more_than_the_backward_pass(
    half_billion: Path,
) -> None:
    full = sections(
        adapter={"enabled": False}, train={"token_budget": 16}, model={"dtype": "float32"}
    )
    found = plan(full, half_billion)
    assert found.update["optimizer's step"] == 2 * 151936 * 896 * 4, (
        "two of the largest weight's size"
    )
    assert "activations" not in found.update


def test_keys_and_values_of_a_prompt_count_once_where_its_length_is_known() -> None:
    def positions(**given: int) -> int:
        sizes = {"group_size": 8, "prompts_per_step": 4, "max_tokens": 2048, **given}
        return kv_positions(PolicySettings.of(Config.model_validate({"rollout": sizes})))

    assert positions() == 33 * 2048
    own = 1024 + 32  # a prompt's last token is the sequence's own, in whole blocks
    assert positions(response_tokens=1024) == 4 * 1024 + 33 * own
    assert positions(response_tokens=1024, concurrency=3) == 3 * 1024 + 4 * own, (
        "of three rows, three prompts"
    )
    assert positions(response_tokens=4096) == 33 * 2048


def test_a_value_head_is_counted() -> None:
    plain, ppo = (
        plan(Config.model_validate({"algo": {"advantage": name}}), bundled_model())
        for name in ("grpo", "gae")
    )
    head = 160 * 160 + 160 + 160 + 1  # two layers
    assert "value head" not in plain.update
    assert ppo.rollout["value head"] == pytest.approx(head * 12, rel=0.01)
    assert ppo.update["value head"] == pytest.approx(head * 16 + 4096 * 160 * 12, rel=0.01)


GiB = 2**30
PARAMETERS = {
    "Qwen2-0.5B": 494_032_768, "Qwen3-0.6B": 596_049_920, "Qwen2.5-1.5B": 1_543_714_304, "Qwen2.5-3B": 3_085_938_688,
    "Qwen3-4B": 4_022_468_096, "Qwen2.5-7B": 7_615_616_512, "Qwen3-8B": 8_190_735_360,
}  # fmt: skip


def test_the_preset_of_a_small_gpu_trains_what_it_promises(shapes: dict[str, Path]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    assert preset_names() == ["qwen2-0.5b-4gb"]
    config, sources = load_config([preset_file("qwen2-0.5b-4gb")])
    assert (config.adapter.r, config.adapter.alpha, config.adapter.dropout) == (8, 16, 0.05)
    assert len(config.adapter.target_modules) == 7 and "qwen2-0.5b-4gb.yaml" in sources["adapter.r"]
    make: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = make.from_config(AutoConfig.from_pretrained(shapes["Qwen2-0.5B"]))
        adapted = add_adapter(model, config.adapter, Path())
    counts = [(p.numel(), p.requires_grad) for p in adapted.parameters()]
    assert (
        sum(n for n, trained in counts if trained) == 4_399_104
        and sum(n for n, _ in counts) == 498_431_872
    )
    changed, planned = fit(config, shapes["Qwen2-0.5B"], gpu_bytes=4.0 * GiB)
    assert not changes(config, changed) and planned.fits and planned.trainable == 4_399_104


def test_what_changes_a_training_least_is_changed_first(shapes: dict[str, Path]) -> None:
    start = settings(train={"checkpointing": "off"})
    folder, sizes = shapes["Qwen2.5-1.5B"], (80, 12, 6, 2.6)
    found = {size: fit(start, folder, gpu_bytes=size * GiB, quantised=True) for size in sizes}
    assert all(planned.fits and planned.peak <= size * GiB for size, (_, planned) in found.items())
    assert {planned.parameters for _, planned in found.values()} == {PARAMETERS["Qwen2.5-1.5B"]}
    large, middle, small, tiny = (config for config, _ in found.values())
    assert not changes(start, large)
    assert (
        middle.adapter.enabled
        and middle.model.quantization == "none"
        and middle.train.checkpointing == "off"
    )
    assert small.train.checkpointing == "auto" and small.model.quantization == "none"
    assert (
        tiny.model.quantization == "4bit"
        and live_rows(tiny) < 32
        and tiny.train.token_budget == 2048
    )
    for config in (middle, small, tiny):
        assert (
            config.rollout.max_tokens == 2048
            and config.rollout.group_size == 8
            and changes(start, config)
        )
    refused, planned = fit(start, shapes["Qwen3-8B"], gpu_bytes=4.0 * GiB)
    assert not planned.fits and refused.model.quantization == "none", "bitsandbytes is not there"


def test_the_table_is_what_the_planner_computes(shapes: dict[str, Path]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    cells = " | ".join(cell(shapes["Qwen3-0.6B"], size) for size in GPUS)
    assert f"| Qwen3-0.6B | {cells} |" in page
    for name, count in PARAMETERS.items():
        assert f"| {name} | {count:,} |" in page


def test_planning_from_the_command_line(shapes: dict[str, Path], cli: Cli) -> None:
    cli("init", "calc-task", "p")
    cli.folder = cli.folder / "p"
    small = ("train", "--preset", "qwen2-0.5b-4gb", "--model", str(shapes["Qwen2-0.5B"]))
    plan = (*small, "--dry-run", "--gpu-memory")
    cli(*plan, "4GiB", said="494,032,768 parameters, 4,399,104 trained, on cuda")
    cli(*plan, "1800MiB", code=3, said="To make it fit: --fit")
    report = cli.json(*plan, "1800MiB", "--fit")
    assert report["fits"] and f"none → {report['config']['model']['quantization']}" in cli.err
    for wrong, said in (
        (["--preset", "qwen2-0.5b"], "Did you mean qwen2-0.5b-4gb?"),
        (["--gpu-memory", "4GiB"], "Add --dry-run"),
        (["--dry-run", "--gpu-memory", "much"], "--gpu-memory: 'much'"),
        (["--fit", "--resume", "last"], "Leave out --fit"),
        (["--accept-changes"], "--accept-changes is for a resume."),
        (["-v"], "--verbose does nothing without --dry-run"),
        (["--watch", "--json"], "--json does nothing with --watch"),
        (["--watch", "--detach"], "--watch does nothing with --detach"),
        (["--dry-run", "--watch"], "--watch does nothing with --dry-run"),
    ):
        cli("train", *wrong, code=2, said=said)
