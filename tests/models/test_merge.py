"""`merge`: full weights and adapters become plain Hugging Face folders that transformers loads by itself."""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl_cli.config import Config
from agentrl_cli.errors import ModelError, NotFound, TemplateError, UsageError
from agentrl_cli.models.merge import merge
from agentrl_cli.reports.model_card import model_card
from agentrl_cli.store import EvalRow, RunRow, Store
from tests.helpers.cli import Cli
from tests.helpers.train import write_model, write_tokenizer

# peft 0.19 asks transformers 5.23 for a name that is on its way out.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

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
    half = merge(
        str(adapter_folder), tmp_path / "half", Config().model, base=tmp_path, dtype="bfloat16"
    )
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
