"""Adapters train, resume, merge and fit one model alone; offloaded state gives AdamW numbers; QLoRA refuses."""

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
from agentrl_cli.learning.muon import Muon
from agentrl_cli.learning.optimizers import OffloadedAdamW, Several, make_optimizer
from agentrl_cli.models import device as quantise
from agentrl_cli.models.adapter import add_adapter, has_dropout, name_base
from agentrl_cli.models.load import adapter_base, load_model, model_folder
from agentrl_cli.models.merge import merge
from agentrl_cli.models.save import save_model
from agentrl_cli.paths import bundled_model
from agentrl_cli.policies.load import load_policy
from agentrl_cli.reports.model_card import model_card
from agentrl_cli.store import EvalRow, RunRow, Store
from tests.helpers.cli import Cli
from tests.helpers.train import trainer_of, write_model, write_tokenizer


async def test_an_adapter_trains_resumes_and_merges(tmp_path: Path, model: Path) -> None:
    kinds = {"use_rslora": True, "use_dora": True}
    sections: dict[str, Any] = {
        "adapter": {"enabled": True, "r": 4, "alpha": 8, **kinds},
        "train": {"steps": 3, "lr": 1e-2, "save_every": 2},
        "algo": {"drop_zero_variance": False},
        "deterministic": True,
    }
    ends = []
    for stop in (0, 2):
        folder, run = tmp_path / f"run{stop}", None
        if stop:
            short = {**sections, "train": {**sections["train"], "steps": stop}}
            async with trainer_of(folder, model, **short) as trainer:
                run = await trainer.train()
        async with trainer_of(folder, model, run=run, **sections) as trainer:
            done = await trainer.train()
            gaps = [
                row["sampling/sampling_logp_difference/max"]
                for row in trainer.store.runs.steps(done.id)
            ]
            assert max(gaps) < 1e-4, "sampler and trainer are the same model"
            last = next(
                Path(c.path) for c in trainer.store.runs.checkpoints(done.id) if c.kind == "last"
            )
            ends.append((last / "adapter_model.safetensors").read_bytes())
            trained = {
                n: p.detach() for n, p in trainer.loaded.model.named_parameters() if p.requires_grad
            }
            assert any("magnitude" in name for name in trained)
            ids = torch.arange(5, 25)[None]
            with torch.no_grad():
                wanted = trainer.loaded.model(ids).logits
    assert ends[0] == ends[1], "a resumed run ends where a whole one does"
    assert kinds.items() <= json.loads((last / "adapter_config.json").read_text()).items()
    config = Config.model_validate(
        {"model": {"name": str(last), "device": "cpu", "dtype": "float32"}}
    )
    merge(str(last), tmp_path / "merged", config.model, base=tmp_path, dtype="float32")
    merged = load_model(tmp_path / "merged", config.model, base=tmp_path)
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, wanted, atol=1e-5)


def test_rslora_scales_by_the_root(model: Path) -> None:
    scales = []
    for rslora in (False, True):
        adapter = {"enabled": True, "r": 16, "alpha": 8, "use_rslora": rslora}
        config = Config.model_validate(
            {"model": {"name": str(model), "device": "cpu"}, "adapter": adapter}
        )
        loaded = load_policy(None, config, base=model, trainable=True)
        scales += [
            m.scaling["default"] for n, m in loaded.model.named_modules() if n.endswith("q_proj")
        ][:1]
    assert scales == [8 / 16, 8 / 4]


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


def test_what_needs_a_gpu_or_a_package_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EnvironmentProblem, match="adamw8bit needs a GPU"):
        make_optimizer(small(), settings(optimizer="adamw8bit"))
    base: dict[str, Any] = {"model": {"name": str(model), "device": "cpu", "quantization": "4bit"}}
    with pytest.raises(ConfigError, match="cannot be trained themselves"):
        load_policy(None, Config.model_validate(base), base=model, trainable=True)
    monkeypatch.setattr(
        quantise, "find_spec", lambda name: None
    )  # bitsandbytes may be installed here
    with pytest.raises(EnvironmentProblem, match="quantization=8bit needs bitsandbytes") as caught:
        quantise.quantization("8bit", torch.device("cuda"), torch.bfloat16)
    assert "agentrl-cli[quant]" in (caught.value.hint or "")


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


def adapter(folder: Path, base: Path, model: Path) -> Path:
    """A fresh adapter of `model` in `folder`, which states that it belongs to `base`."""
    loaded: Any = add_adapter(
        load_model(model, CONFIG, base=folder.parent), LoraConfig(enabled=True, r=2), folder.parent
    )
    save_model(loaded, model, folder)
    reported = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps({**reported, "base_model_name_or_path": str(base)})
    )
    return folder


def test_an_adapter_is_loaded_and_merged_over_its_own_base_without_a_word(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from agentrl_cli.models.merge import merge

    folder = adapter(tmp_path / "adapter", source, source)
    assert adapter_base(folder, CONFIG, base=tmp_path) == source
    loaded: Any = load_model(folder, CONFIG, base=tmp_path)
    assert tuple(capfd.readouterr()) == ("", "")
    own: Any = load_model(source, CONFIG, base=tmp_path)
    kept = loaded.get_base_model().model.embed_tokens.weight
    torch.testing.assert_close(kept, own.model.embed_tokens.weight, atol=0, rtol=0)
    done = merge(str(folder), tmp_path / "out", Config().model, base=tmp_path)
    merged: Any = load_model(done.folder, CONFIG, base=tmp_path)
    assert merged.config.hidden_size == 32


def test_the_bundled_model_stands_in_only_where_the_folder_is_missing(
    source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()

    def base_of(name: str) -> Path:
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name}))
        return adapter_base(folder, CONFIG, base=tmp_path)

    assert base_of(str(bundled_model())) == base_of("tiny") == bundled_model()
    assert base_of(str(tmp_path / "elsewhere" / "tiny-agent")) == bundled_model()
    assert base_of("tiny-agent") == base_of(str(bundled_model("tiny-agent"))) == bundled_model()
    shutil.copytree(source, tmp_path / "elsewhere" / "tiny-agent")
    assert (
        base_of(str(tmp_path / "elsewhere" / "tiny-agent")) == tmp_path / "elsewhere" / "tiny-agent"
    )
    assert base_of("elsewhere/tiny-agent") == tmp_path / "elsewhere" / "tiny-agent"
    with pytest.raises(ModelError, match="not found"):
        base_of(str(tmp_path / "nowhere" / "another"))
    with pytest.raises(ModelError, match="not found"):
        base_of("./nowhere/tiny-agent")


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


def test_the_seed_makes_the_adapter(source: Path, tmp_path: Path) -> None:
    def first(seed: int) -> torch.Tensor:
        config = Config.model_validate(
            {
                "model": {"device": "cpu"},
                "adapter": {"enabled": True, "r": 2},
                "seed": seed,
                "deterministic": True,
            }
        )
        torch.rand(3)  # whatever happened before
        loaded = load_policy(str(source), config, base=tmp_path, trainable=True)
        found: torch.Tensor = next(
            p.detach() for name, p in loaded.model.named_parameters() if "lora_A" in name
        )
        return found

    assert torch.equal(first(3), first(3)) and not torch.equal(first(3), first(4))


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


def unusable(folder: Path, kind: str) -> Path:
    given: dict[str, Any] = json.loads((folder / "config.json").read_text())
    changes: dict[str, dict[str, Any]] = {
        "awq": {"quantization_config": {"quant_method": "awq", "bits": 4}},
        "encoder": {"architectures": ["BertForMaskedLM"]},
        "encoder-decoder": {"is_encoder_decoder": True},
        "unknown": {"model_type": "unheard_of", "architectures": ["UnheardOfForCausalLM"]},
    }
    (folder / "config.json").write_text(json.dumps(given | changes.get(kind, {})))
    if kind == "pointer":
        (folder / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        )
    if kind == "cut":
        (folder / "model.safetensors").write_bytes(
            (folder / "model.safetensors").read_bytes()[:2000]
        )
    if kind == "gguf":
        (folder / "model.safetensors").rename(folder / "model-Q4.gguf")
        (folder / "config.json").unlink()
    return folder


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
    folder = unusable(Path(shutil.copytree(source, tmp_path / kind)), kind)
    with pytest.raises(ModelError, match=said) as error:
        load_model(model_folder(str(folder), Config().model, base=tmp_path), CONFIG, base=tmp_path)
    assert do in error.value.hint


# --- `merge` makes folders that transformers loads by itself ---


# peft 0.19 asks transformers 5.23 for a name that is on its way out.

IDS = torch.arange(3, 23)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def adapter_folder(base_folder: Path) -> Path:
    """A LoRA adapter that changes the model (B is random, not zero)."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = base_folder.parent / "adapter"
    model: Any = AutoModelForCausalLM.from_pretrained(base_folder)
    model = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "trainer.pt").write_bytes(b"state")
    return folder


def test_an_adapter_is_merged(base_folder: Path, adapter_folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = merge(str(adapter_folder), tmp_path / "out", Config().model, base=tmp_path)
    assert done.adapter and done.dtype == "float32" and done.folder == tmp_path / "out"
    base = AutoModelForCausalLM.from_pretrained(base_folder)
    before = logits(base)
    wanted = logits(PeftModel.from_pretrained(base, str(adapter_folder)).eval())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(merged), wanted, atol=1e-5, rtol=1e-4)
    assert (wanted - before).abs().max() > 0.1
    assert {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
    } <= set(done.files)
    assert not {"adapter_config.json", "adapter_model.safetensors", "trainer.pt"} & set(done.files)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    few = Config().model.replace(quantization="4bit")  # of the training: nothing is merged in it
    half = merge(str(adapter_folder), tmp_path / "half", few, base=tmp_path, dtype="bfloat16")
    assert half.dtype == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype is torch.bfloat16


def test_full_weights_are_copied_bit_by_bit(base_folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "best"
    shutil.copytree(base_folder, checkpoint)
    (checkpoint / "trainer.pt").write_bytes(b"state")
    (checkpoint / "README.md").write_text("an old card")
    done = merge("checkpoints/best", tmp_path / "out", Config().model, base=tmp_path)
    assert not done.adapter and "trainer.pt" not in done.files
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        assert (done.folder / name).read_bytes() == (base_folder / name).read_bytes()
    assert not (done.folder / "README.md").exists()
    assert not list(tmp_path.glob(".out*"))


def test_the_model_card_says_where_it_comes_from(base_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "best"
    shutil.copytree(base_folder, folder)
    with Store.open(tmp_path / "a.db") as store:
        config = {"algo": {"advantage": "grpo", "loss": "ppo_clip"}, "train": {"lr": 0.0001}}
        run = store.runs.add(
            RunRow(
                id="",
                name="fox",
                model="Qwen/Qwen2.5-0.5B",
                pack="calc-task",
                seed=7,
                total_steps=60,
                config=config,
            )
        )
        store.runs.add_checkpoint(run.id, 40, folder, {}, "best")
        store.runs.add_eval(EvalRow(run.id, 40, "step-40", "test", 150, 4, 0.912, 0.88, 0.94))
        store.runs.add_eval(EvalRow(run.id, 20, "step-20", "test", 150, 4, 0.5, 0.4, 0.6))
        after = store.runs.add(
            RunRow(id="", name="eval-fox", kind="eval", parent_id=run.id, parent_step=40)
        )
        store.runs.add_eval(EvalRow(after.id, 40, "fox@best", "test", 168, 4, 0.93, 0.9, 0.95))
        store.runs.add_eval(
            EvalRow(after.id, 40, "fox@best", "test", 168, 4, 0.1, 0.0, 0.2, {"tools": False})
        )
        card_of = partial(model_card, "fox@best", store)
        done = merge(
            "fox@best", tmp_path / "out", Config().model, base=tmp_path, store=store, card=card_of
        )
        with pytest.raises(NotFound, match="bset"):
            merge("fox@bset", tmp_path / "out2", Config().model, base=tmp_path, store=store)
    card = (done.folder / "README.md").read_text()
    head = card.split("---\n")[1]
    assert "base_model: Qwen/Qwen2.5-0.5B\n" in head and "library_name: transformers\n" in head
    assert "| run | fox, step 40 of 60 |" in card and "| advantage, loss | grpo, ppo_clip |" in card
    assert "| seed | 7 |" in card and "| tasks | calc-task |" in card
    assert (
        "| test | 150 | 4 | 0.912 | 0.880 to 0.940 |" in card
        and "| test | 168 | 4 | 0.930 |" in card
    )
    assert "0.500" not in card and "0.100" not in card and str(tmp_path) not in card


def test_another_chat_template_goes_along(base_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    config = Config.model_validate({"model": {"chat_template": "mine.jinja"}})
    done = merge(str(base_folder), tmp_path / "out", config.model, base=tmp_path)
    assert (done.folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


def test_what_is_in_the_way_stays(base_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="there already"):
        merge(str(base_folder), out, Config().model, base=tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        merge(str(base_folder), out / "mine.txt", Config().model, base=tmp_path)
    with pytest.raises(UsageError, match="holds the model"):
        merge(str(base_folder), base_folder, Config().model, base=tmp_path, force=True)
    with pytest.raises(UsageError, match="holds the model"):
        merge(str(base_folder), base_folder.parent, Config().model, base=tmp_path, force=True)
    assert (out / "mine.txt").read_text() == "mine"
    merge(str(base_folder), out, Config().model, base=tmp_path, force=True)
    assert not (out / "mine.txt").exists() and (out / "model.safetensors").is_file()


def test_broken_sources_leave_nothing(
    base_folder: Path, adapter_folder: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(base_folder, bare)
    os.remove(bare / "chat_template.jinja")
    with pytest.raises((TemplateError, ModelError), match="chat template"):
        merge("bare", tmp_path / "out", Config().model, base=tmp_path)
    corrupt = tmp_path / "corrupt"
    shutil.copytree(adapter_folder, corrupt)
    (corrupt / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        merge("corrupt", tmp_path / "out", Config().model, base=tmp_path)
    with pytest.raises(ModelError, match="nowhere"):
        merge("./nowhere", tmp_path / "out", Config().model, base=tmp_path)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_the_command(base_folder: Path, cli: Cli) -> None:
    out, project = cli.folder / "out", cli.folder / "project"
    (project / "runs").mkdir(parents=True)
    (project / "agentrl.yaml").write_text("seed: 1\n")
    cli.always = ("--project", str(project))
    cli("merge", str(out), code=2, said="Nothing was trained")
    with Store.open(project / "runs" / "agentrl.db") as store:
        run = store.runs.add(RunRow(id="", name="fox", model="tiny"))
        store.runs.add_checkpoint(run.id, 40, base_folder, {}, "last")
    read = cli.json("merge", str(out))
    assert (read["folder"], read["adapter"], read["dtype"]) == (str(out), False, "float32")
    cli("merge", "fox@last", str(out), code=2, said="--force")
    assert cli("merge", "last", str(out), "--force") == f"{out}\n"
    cli("merge", "last", str(out), "--dtype", "int8", code=2)


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
