"""Adapters train, resume, merge and fit one model alone; offloaded state gives AdamW numbers; QLoRA refuses.

QLoRA on a CPU: a base in 4 or 8 bits, sampled, trained under an adapter, saved and resumed.
"""

import copy
import json
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from agentrl_cli.config import Config, LoraConfig, ModelConfig, TrainConfig
from agentrl_cli.errors import (
    ConfigError,
    EnvironmentProblem,
    ModelError,
    NotFound,
    TemplateError,
    UsageError,
)
from agentrl_cli.evaluate import Settings, fingerprint
from agentrl_cli.learning.optimizers import Muon, OffloadedAdamW, Several, make_optimizer
from agentrl_cli.models import device as quantise
from agentrl_cli.models.adapter import add_adapter, has_dropout, name_base
from agentrl_cli.models.load import adapter_base, load_model, model_folder
from agentrl_cli.models.merge import Merged, merge
from agentrl_cli.models.save import save_model
from agentrl_cli.paths import bundled_model
from agentrl_cli.policies.load import load_policy
from agentrl_cli.reports.model_card import model_card
from agentrl_cli.store import EvalRow, RunRow, Store
from tests.helpers.cli import Cli
from tests.helpers.train import after_training, trainer_of, write_model, write_tokenizer


async def test_an_adapter_trains_resumes_and_merges(tmp_path: Path, model: Path) -> None:
    kinds = {"use_rslora": True, "use_dora": True}
    sections: dict[str, Any] = {
        "adapter": {"enabled": True, "r": 4, "alpha": 8, **kinds},
        "train": {"steps": 3, "lr": 1e-2, "save_every": 2},
        "algo": {"drop_zero_variance": False},
        "deterministic": True,
    }
    ends, ids = [], torch.arange(5, 25)[None]
    for stop in (0, 2):
        folder, run = tmp_path / f"run{stop}", None
        if stop:
            short = {**sections, "train": {**sections["train"], "steps": stop}}
            async with after_training(folder, model, **short) as (_, run):
                pass
        async with after_training(folder, model, run=run, **sections) as (trainer, done):
            steps, saved = (
                trainer.store.runs.steps(done.id),
                trainer.store.runs.checkpoints(done.id),
            )
            gaps = [row["sampling/sampling_logp_difference/max"] for row in steps]
            assert max(gaps) < 1e-4, "sampler and trainer are the same model"
            last = next(Path(one.path) for one in saved if one.kind == "last")
            ends.append((last / "adapter_model.safetensors").read_bytes())
            named = trainer.loaded.model.named_parameters()
            assert any("magnitude" in name for name, p in named if p.requires_grad)
            wanted = logits(trainer.loaded.model, ids)
    assert ends[0] == ends[1], "a resumed run ends where a whole one does"
    assert kinds.items() <= json.loads((last / "adapter_config.json").read_text()).items()
    bare = shutil.copytree(last, tmp_path / "bare")
    for name in ("tokenizer.json", "checksums.json"):
        (bare / name).unlink()
    sections["adapter"] = {"enabled": True, "path": str(bare)}
    async with trainer_of(tmp_path / "further", model, **sections) as trainer:
        config, name = trainer.rollout.context.config, f"{trainer.run.name}@base"
        began = load_policy(name, config, base=tmp_path, store=trainer.store)
        assert torch.equal(logits(began.model, ids), wanted), "the base of a run is where it began"
    merged_from(last, tmp_path, "merged", dtype="float32")
    merged = load_model(tmp_path / "merged", CONFIG, base=tmp_path)
    assert torch.allclose(logits(merged, ids), wanted, atol=1e-5)


def steps(model: torch.nn.Module, settings: TrainConfig, count: int = 5) -> Any:
    optimizer = make_optimizer(model, settings)
    for n in range(count):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr / (n + 1)
        (model(torch.full((3, 4), 0.5 + n)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return optimizer


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def settings(**given: Any) -> TrainConfig:
    return TrainConfig.model_validate(given)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_offloaded_state_gives_the_same_numbers() -> None:
    plain, offloaded = small(), small()
    steps(plain, settings(lr=0.1, optimizer={"weight_decay": 0.1}))
    optimizer = steps(
        offloaded, settings(lr=0.1, optimizer={"name": "adamw_offload", "weight_decay": 0.1})
    )
    assert torch.equal(flat(plain), flat(offloaded))
    assert isinstance(optimizer, OffloadedAdamW) and all(
        p.grad is None for p in offloaded.parameters()
    )
    assert all(s["exp_avg"].device.type == "cpu" for s in optimizer.inner.state.values())
    later = copy.deepcopy(offloaded)
    again = make_optimizer(
        later, settings(lr=0.1, optimizer={"name": "adamw_offload", "weight_decay": 0.1})
    )
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, opt in ((offloaded, optimizer), (later, again)):
        one(torch.ones(1, 4)).sum().backward()
        opt.step()
    assert torch.equal(flat(offloaded), flat(later)), "a checkpoint goes on exactly"


def test_offloaded_copies_keep_what_bfloat16_would_lose() -> None:
    model = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = make_optimizer(model, settings(lr=1e-4, optimizer="adamw_offload"))
    for _ in range(100):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    assert float(optimizer.copies[0].detach()) == pytest.approx(0.99, abs=1e-4)
    assert float(model.weight.detach()) == pytest.approx(0.99, abs=4e-3), "steps of 1e-4 add up"


def test_muon_takes_hidden_matrices_only() -> None:
    model = small()
    before = flat(model)
    optimizer = steps(model, settings(lr=0.05, optimizer="muon"))
    assert isinstance(optimizer, Several)
    kinds = {
        type(one).__name__: sum(len(g["params"]) for g in one.param_groups)
        for one in optimizer.optimizers
    }
    assert kinds == {"Muon": 2, "AdamW": 2} and not torch.equal(before, flat(model))
    again = make_optimizer(model, settings(lr=0.05, optimizer="muon"))
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("match_rms", [False, True])
def test_muon_steps_as_torchs_does_but_for_its_bfloat16(match_rms: bool) -> None:
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in ((6, 10), (6, 10), (10, 6))]
    own, theirs = ([nn.Parameter(one.clone()) for one in start] for _ in range(2))
    adjust = "match_rms_adamw" if match_rms else None
    pair = (
        Muon(own, lr=0.02, match_rms=match_rms),
        torch.optim.Muon(theirs, lr=0.02, adjust_lr_fn=adjust),
    )
    for _ in range(3):
        for a, b in zip(own, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in pair:
            optimizer.step()
    for a, b, before in zip(own, theirs, start, strict=True):
        assert (a - b).norm() < 0.03 * (b - before).norm()  # five products in bfloat16
    again = Muon(own, lr=0.5, match_rms=match_rms)
    again.load_state_dict(pair[1].state_dict())  # checkpoints of torch's continue
    assert again.param_groups[0]["lr"] == 0.02
    again.step()


def test_states_in_8_bits_need_a_gpu() -> None:
    with pytest.raises(EnvironmentProblem, match="adamw8bit needs a GPU"):
        make_optimizer(small(), settings(optimizer="adamw8bit"))


def test_what_transformers_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        quantise, "find_spec", lambda name: object()
    )  # bitsandbytes is not needed for the settings
    four = quantise.settings("4bit", torch.bfloat16)
    assert (four.load_in_4bit, four.bnb_4bit_quant_type, four.bnb_4bit_use_double_quant) == (
        True,
        "nf4",
        True,
    )
    assert four.bnb_4bit_compute_dtype is torch.bfloat16
    given = quantise.quantization("8bit", torch.device("cuda", 1), torch.bfloat16)
    assert given["quantization_config"].load_in_8bit and given["device_map"] == {
        "": torch.device("cuda", 1)
    }


CONFIG = ModelConfig(dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny-agent")


def test_the_bundled_model_stands_in_only_where_the_folder_is_missing(
    source: Path, tmp_path: Path
) -> None:
    folder, own = tmp_path / "adapter", tmp_path / "elsewhere" / "tiny-agent"
    folder.mkdir()

    def base_of(name: Path | str) -> Path:
        reported = {"base_model_name_or_path": str(name)}
        (folder / "adapter_config.json").write_text(json.dumps(reported))
        return adapter_base(folder, CONFIG, base=tmp_path)

    bundled = (bundled_model(), "tiny", own, "tiny-agent", bundled_model("tiny-agent"))
    assert {base_of(name) for name in bundled} == {bundled_model()}
    shutil.copytree(source, own)
    assert base_of(own) == base_of("elsewhere/tiny-agent") == own
    for name in (tmp_path / "nowhere" / "another", "./nowhere/tiny-agent", "~no-user/x"):
        with pytest.raises(ModelError, match="not found"):
            base_of(name)


def test_weights_that_are_missing_are_never_made_up(source: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "holes"
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"not all there: it lacks model.layers.0.mlp.up_proj.weight.$"
    ):
        load_model(folder, CONFIG, base=tmp_path)


def test_an_adapter_of_a_hub_model_names_it_and_not_a_folder_of_this_machine(
    source: Path, tmp_path: Path
) -> None:
    loaded: Any = add_adapter(
        load_model(source, CONFIG, base=tmp_path), LoraConfig(enabled=True, r=2), tmp_path
    )
    name_base(loaded, "org/name", "v1")
    save_model(loaded, source, tmp_path / "adapter")  # asks no hub: there is none here
    reported = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (reported["base_model_name_or_path"], reported["revision"]) == ("org/name", "v1")
    with pytest.raises(ModelError, match="org/name cannot be had"):
        adapter_base(tmp_path / "adapter", ModelConfig(offline=True), base=tmp_path)
    loaded.peft_config["default"].base_model_name_or_path = str(source)
    loaded.peft_config["default"].save_pretrained(str(tmp_path / "adapter"))
    path, has = {"path": "adapter"}, "would have no effect: the adapter adapter has"
    targets = ["q_proj"]
    for name, adapter, why in (
        (source, {**path, "enabled": False}, "would not be trained.*enabled is false"),
        ("adapter", {**path, "enabled": True}, "would not be trained.*itself"),
        ("adapter", {"enabled": True, "r": 8}, rf"adapter.r \(8\) {has} 2"),
        (source, {**path, "enabled": True, "use_dora": True}, rf"use_dora \(True\) {has} False"),
        ("adapter", {"enabled": True, "target_modules": targets}, rf"{has} \['down_proj', "),
    ):
        given = {"model": {"name": str(name)}, "adapter": adapter}
        with pytest.raises(ConfigError, match=why):
            load_policy(None, Config.model_validate(given), base=tmp_path, trainable=True)
    given = {"model": {"name": "adapter"}, "adapter": {"enabled": True, "r": 2, "alpha": 32}}
    load_policy(None, Config.model_validate(given), base=tmp_path, trainable=True)


@pytest.mark.parametrize(
    ("kind", "said", "do"),
    [
        ("awq", "cannot be loaded", "quantised by awq: use the model that it was made from"),
        ("encoder", "BertForMaskedLM does not generate text", "causal language model"),
        ("encoder-decoder", "is an encoder-decoder model", "causal language model"),
        ("unknown", "unheard_of", "newer transformers"),
        ("pointer", "a pointer of git-lfs", "lfs pull"),
        ("cut", "are corrupt", "download the folder again"),
        ("gguf", "holds GGUF files", "model-Q4.gguf"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_with_what_to_do(
    source: Path, tmp_path: Path, kind: str, said: str, do: str
) -> None:
    folder = Path(shutil.copytree(source, tmp_path / kind))
    config, weights = folder / "config.json", folder / "model.safetensors"
    changes: dict[str, dict[str, Any]] = {
        "awq": {"quantization_config": {"quant_method": "awq", "bits": 4}},
        "encoder": {"architectures": ["BertForMaskedLM"]},
        "encoder-decoder": {"is_encoder_decoder": True},
        "unknown": {"model_type": "unheard_of", "architectures": ["UnheardOfForCausalLM"]},
    }
    config.write_text(json.dumps(json.loads(config.read_text()) | changes.get(kind, {})))
    if kind == "pointer":
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    if kind == "cut":
        weights.write_bytes(weights.read_bytes()[:2000])
    if kind == "gguf":
        weights.rename(folder / "model-Q4.gguf")
        config.unlink()
    with pytest.raises(ModelError, match=said) as error:
        load_model(model_folder(str(folder), Config().model, base=tmp_path), CONFIG, base=tmp_path)
    assert do in error.value.hint


# --- `merge` makes folders that transformers loads by itself ---


IDS = torch.arange(3, 23)[None]
WHOLE = ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja")


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


@pytest.fixture(scope="module")
def adapter_folder(source: Path) -> Path:
    """A LoRA adapter that changes the model (B is random, not zero)."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder, model = source.parent / "adapter", AutoModelForCausalLM.from_pretrained(source)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(model, lora)
    torch.manual_seed(1)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    adapted.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "trainer.pt").write_bytes(b"state")
    return folder


def merged_from(name: Path | str, base: Path, out: str = "out", **options: Any) -> Merged:
    """Merge what has this name into a folder beside `base`."""
    return merge(str(name), base / out, Config().model, base=base, **options)


def test_an_adapter_of_damaged_weights_is_named(adapter_folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(adapter_folder, tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match=r"The adapter in .*broken cannot be loaded"):
        load_model(broken, CONFIG, base=tmp_path)
    (broken / "adapter_model.safetensors").unlink()
    for content in (b"", b"nonsense"):
        (broken / "adapter_model.bin").write_bytes(content)
        with pytest.raises(ModelError, match=r"The adapter in .*broken cannot be loaded"):
            load_model(broken, CONFIG, base=tmp_path)


def test_an_adapter_is_loaded_without_a_word_and_merged(
    source: Path, adapter_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert adapter_base(adapter_folder, CONFIG, base=tmp_path) == source
    capfd.readouterr()
    loaded = load_model(adapter_folder, CONFIG, base=tmp_path)
    assert tuple(capfd.readouterr()) == ("", "")
    done = merged_from(adapter_folder, tmp_path)
    assert (done.adapter, done.dtype, done.folder) == (True, "float32", tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(source)
    before = logits(base)
    wanted = logits(PeftModel.from_pretrained(base, str(adapter_folder)).eval())
    for made in (loaded, AutoModelForCausalLM.from_pretrained(done.folder)):
        torch.testing.assert_close(logits(made), wanted, atol=1e-5, rtol=1e-4)
    assert (wanted - before).abs().max() > 0.1
    assert {*WHOLE} <= set(done.files)
    assert not {"adapter_config.json", "adapter_model.safetensors", "trainer.pt"} & set(done.files)
    tokenizer: Any = AutoTokenizer.from_pretrained(done.folder)
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    few = Config().model.replace(quantization="4bit")  # of the training: nothing is merged in it
    half = merge(str(adapter_folder), tmp_path / "half", few, base=tmp_path, dtype="bfloat16")
    assert half.dtype == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(half.folder).dtype is torch.bfloat16


def test_an_evaluation_of_an_adapter_is_one_of_its_base_too(
    source: Path, adapter_folder: Path, tmp_path: Path
) -> None:
    adapter = shutil.copytree(adapter_folder, tmp_path / "adapter")
    prints = set()
    for name, changed in (("a", 0), ("b", 0), ("b", 1)):
        base = shutil.copytree(source, tmp_path / name, dirs_exist_ok=True)
        if changed:
            os.utime(base / "model.safetensors", ns=(changed, changed))
        of = json.loads((adapter / "adapter_config.json").read_text())
        of["base_model_name_or_path"] = str(base)
        (adapter / "adapter_config.json").write_text(json.dumps(of))
        os.utime(adapter / "adapter_config.json", ns=(1, 1))
        loaded = load_policy(str(adapter), Config(), base=tmp_path)
        prints.add(fingerprint(loaded, {}, Config(), [], Settings.of(Config())))
    assert len(prints) == 2  # a copy is the same base


def test_full_weights_are_copied_bit_by_bit(source: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(source, tmp_path / "checkpoints" / "best")
    (checkpoint / "trainer.pt").write_bytes(b"state")
    (checkpoint / "README.md").write_text("an old card")
    done = merged_from("checkpoints/best", tmp_path)
    assert not done.adapter and not {"trainer.pt", "README.md"} & set(done.files)
    for name in WHOLE:
        assert (done.folder / name).read_bytes() == (source / name).read_bytes()
    assert not list(tmp_path.glob(".out*"))


def test_the_model_card_says_where_it_comes_from(source: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "best")
    config = {"algo": {"advantage": "grpo", "loss": "ppo_clip"}, "train": {"lr": 0.0001}}
    of: dict[str, Any] = {"model": "Qwen/Qwen2.5-0.5B", "pack": "calc-task", "config": config}
    with Store.open(tmp_path / "a.db") as store:
        run = store.runs.add(RunRow(id="", name="fox", seed=7, total_steps=60, **of))
        store.runs.add_checkpoint(run.id, 40, folder, {}, "best")
        parent: dict[str, Any] = {"parent_id": run.id, "parent_step": 40}
        after = store.runs.add(RunRow(id="", name="eval-fox", kind="eval", **parent)).id
        for row in (
            EvalRow(run.id, 40, "step-40", "test", 150, 4, 0.912, 0.88, 0.94),
            EvalRow(run.id, 20, "step-20", "test", 150, 4, 0.5, 0.4, 0.6),
            EvalRow(after, 40, "fox@best", "test", 168, 4, 0.93, 0.9, 0.95),
            EvalRow(after, 40, "fox@best", "test", 168, 4, 0.1, 0.0, 0.2, {"tools": False}),
        ):
            store.runs.add_eval(row)
        card_of = partial(model_card, "fox@best", store)
        done = merged_from("fox@best", tmp_path, store=store, card=card_of)
        with pytest.raises(NotFound, match="bset"):
            merged_from("fox@bset", tmp_path, "out2", store=store)
    card = (done.folder / "README.md").read_text()
    for line in (
        "base_model: Qwen/Qwen2.5-0.5B\n",
        "library_name: transformers\n",
        "| run | fox, step 40 of 60 |",
        "| advantage, loss | grpo, ppo_clip |",
        "| seed | 7 |",
        "| tasks | calc-task |",
        "| test | 150 | 4 | 0.912 | 0.880 to 0.940 |",
        "| test | 168 | 4 | 0.930 |",
    ):
        assert line in card
    assert not [text for text in ("0.500", "0.100", str(tmp_path)) if text in card]


def test_another_chat_template_goes_along(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    config = Config.model_validate({"model": {"chat_template": "mine.jinja"}})
    done = merge(str(source), tmp_path / "out", config.model, base=tmp_path)
    assert (done.folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    (tmp_path / "mine.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(ModelError, match=r"No chat template at .*mine.jinja: 'utf-8' codec"):
        merge(str(source), tmp_path / "other", config.model, base=tmp_path)


def test_what_is_in_the_way_stays(source: Path, tmp_path: Path) -> None:
    mine = tmp_path / "out" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    for out, force, said in (
        (mine.parent, False, "there already"),
        (mine, False, "is not a folder"),
        (Path(os.devnull), True, "is not a folder"),
        (source, True, "holds the model"),
        (source.parent, True, "holds the model"),
    ):
        with pytest.raises(UsageError, match=said):
            merge(str(source), out, Config().model, base=tmp_path, force=force)
    assert mine.read_text() == "mine"
    done = merged_from(source, tmp_path, force=True)
    assert not mine.exists() and (done.folder / "model.safetensors").is_file()


def test_broken_sources_leave_nothing(source: Path, adapter_folder: Path, tmp_path: Path) -> None:
    (shutil.copytree(source, tmp_path / "bare") / "chat_template.jinja").unlink()
    corrupt = shutil.copytree(adapter_folder, tmp_path / "corrupt")
    (corrupt / "adapter_config.json").write_text("{")
    for name, said in (
        ("bare", "chat template"),
        ("corrupt", "cannot be read"),
        ("./nowhere", "nowhere"),
    ):
        with pytest.raises((TemplateError, ModelError), match=said):
            merged_from(name, tmp_path)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_the_command(source: Path, cli: Cli) -> None:
    out, project = str(cli.folder / "out"), cli.folder / "project"
    (project / "runs").mkdir(parents=True)
    (project / "agentrl.yaml").write_text("seed: 1\n")
    cli.always = ("--project", str(project))
    cli("merge", out, code=2, said="Nothing was trained")
    with Store.open(project / "runs" / "agentrl.db") as store:
        run = store.runs.add(RunRow(id="", name="fox", model="tiny"))
        store.runs.add_checkpoint(run.id, 40, source, {}, "last")
    read = cli.json("merge", out)
    assert (read["folder"], read["adapter"], read["dtype"]) == (out, False, "float32")
    cli("merge", "fox@last", out, code=2, said="--force")
    assert cli("merge", "last", out, "--force") == f"{out}\n"
    cli("merge", "last", out, "--dtype", "int8", code=2)


@pytest.mark.parametrize(
    ("config", "share", "draws"),
    [
        (None, 0.0, False),
        (None, 0.1, True),
        ({"dropout": 0.0, "text_config": None}, 0.0, False),
        ({"dropout": 0.1, "text_config": None}, 0.0, True),
        ({"text_config": SimpleNamespace(attention_dropout=0.2)}, 0.0, True),
    ],
)
def test_dropout_is_found_in_modules_and_in_settings(
    config: dict[str, Any] | None, share: float, draws: bool
) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Dropout(share))
    model.config = config and SimpleNamespace(**config)
    assert has_dropout(model) is draws


# --- a base in few bits ---


@pytest.mark.filterwarnings("ignore")  # bitsandbytes' own, on this torch
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
async def test_a_base_in_few_bits_is_trained_under_an_adapter(tmp_path: Path, bits: str) -> None:
    why = "QLoRA needs bitsandbytes 0.46 (the extra quant)"
    pytest.importorskip("bitsandbytes", minversion="0.46", reason=why)
    folder = write_model(
        tmp_path / "model", hidden=64, head_dim=32
    )  # what the kernels for CPUs take
    sections: dict[str, Any] = {
        "model": {"quantization": bits},
        "adapter": {"enabled": True, "r": 2},
    }
    async with trainer_of(tmp_path / "project", folder, **sections) as trainer:
        model = trainer.loaded.model
        kinds = {type(p).__name__ for p in model.parameters()}
        assert {"4bit": "Params4bit", "8bit": "Int8Params"}[bits] in kinds
        trained = {
            name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad
        }
        frozen = {
            name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad
        }
        assert trained and all("lora" in name for name in trained)
        run = await trainer.train()
        assert (run.status, run.step) == ("finished", 2)
        now = dict(model.named_parameters())
        assert any(not torch.equal(now[name], was) for name, was in trained.items())
        if bits == "8bit":  # 4 bits are laid out for the processor when they are first used
            assert all(torch.equal(now[name], was) for name, was in frozen.items())
    async with trainer_of(
        tmp_path / "project", folder, run=run, train={"steps": 3}, **sections
    ) as trainer:
        assert (await trainer.train()).step == 3
