"""An adapter goes onto the model it was trained on, and loading says nothing that its user cannot help."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl_cli.config import Config
from agentrl_cli.config.models import LoraConfig, ModelConfig
from agentrl_cli.errors import ModelError
from agentrl_cli.models.adapter import add_adapter, name_base
from agentrl_cli.models.load import adapter_base, load_model, model_folder
from agentrl_cli.models.save import save_model
from agentrl_cli.paths import bundled_model
from agentrl_cli.policies.load import load_policy
from tests.helpers.train import write_model

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
    """Over a model of one's own named tiny-agent; neither bars nor warnings."""
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
    """A folder of a model that cannot be trained."""
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
