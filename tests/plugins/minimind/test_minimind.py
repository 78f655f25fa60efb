"""minimind's model, rows, tools and rewards as they are, from its weights to its own loader again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from agentrl_cli import Outcome, load_pack
from agentrl_cli.config.models import ModelConfig
from agentrl_cli.errors import DataError, ModelError
from agentrl_cli.learning.forward import way_of
from agentrl_cli.models.load import load_model
from agentrl_cli.paths import bundled_model, find_pack
from agentrl_cli.plugins.minimind.command import convert
from agentrl_cli.registry import load_file
from agentrl_cli.tasks.forms import normal
from tests.helpers.chat import call
from tests.helpers.cli import Cli
from tests.helpers.packs import pack, play
from tests.sft.test_sft import CALLED, SYSTEM

# minimind's 2-layer configuration.
HIDDEN, HEADS, GROUPS, INNER = 128, 8, 4, 448


def native_weights(vocabulary: int) -> dict[str, torch.Tensor]:
    """Weights under model_minimind.py's names, drawn at random."""
    width, found = HIDDEN // HEADS, {"model.norm.weight": torch.rand(HIDDEN) + 0.5}
    for layer in ("model.layers.0", "model.layers.1"):
        for name, out, into in (
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.k_proj", GROUPS * width, HIDDEN),
            ("self_attn.v_proj", GROUPS * width, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            found[f"{layer}.{name}.weight"] = torch.randn(out, into) / into**0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}.{name}.weight"] = torch.rand(HIDDEN) + 0.5
        for name in ("q_norm", "k_norm"):
            found[f"{layer}.self_attn.{name}.weight"] = torch.rand(width) + 0.5
    head = torch.randn(vocabulary, HIDDEN)
    return {**found, "model.embed_tokens.weight": head, "lm_head.weight": head}


def native_logits(weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """model_minimind.py's MiniMindForCausalLM, written again: same names, same formulas."""
    width, length = HIDDEN // HEADS, ids.shape[1]
    rates = 1.0 / (1e6 ** (torch.arange(0, width, 2).float() / width))
    angles = torch.outer(torch.arange(length), rates).repeat(1, 2)

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return weights[f"{name}.weight"] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def heads(name: str, x: torch.Tensor) -> torch.Tensor:
        return (x @ weights[f"{name}_proj.weight"].T).view(1, length, -1, width).transpose(1, 2)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    x = weights["model.embed_tokens.weight"][ids]
    for layer in ("model.layers.0", "model.layers.1"):
        own, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        h = norm(f"{layer}.input_layernorm", x)
        q = turned(norm(f"{own}.q_norm", heads(f"{own}.q", h)))
        k = turned(norm(f"{own}.k_norm", heads(f"{own}.k", h)))
        k, v = (one.repeat_interleave(HEADS // GROUPS, 1) for one in (k, heads(f"{own}.v", h)))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).reshape(1, length, HIDDEN)
        x = x + out @ weights[f"{own}.o_proj.weight"].T
        h = norm(f"{layer}.post_attention_layernorm", x)
        inner = torch.nn.functional.silu(h @ weights[f"{mlp}.gate_proj.weight"].T)
        inner = inner * (h @ weights[f"{mlp}.up_proj.weight"].T)
        x = x + inner @ weights[f"{mlp}.down_proj.weight"].T
    return norm("model.norm", x) @ weights["lm_head.weight"].T


AGENT: dict[str, Any] = {
    "conversations": [SYSTEM, CALLED[0], {"role": "assistant", "content": ""}],
    "gt": ["5"],
}
CODE = """
import math
import torch

TOOLS = [{"type": "function", "function": {"name": "calculate_math", "description": "d", "parameters": {
    "type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}]
MOCK_RESULTS = {
    "calculate_math": lambda args: {"result": str(eval(str(args.get("expression", "0")), {"__builtins__": {}}))},
    "get_current_time": lambda args: None,
}

def calculate_rewards(prompts, completions, gt_batch, tools_batch, num_gen, reward_model=None, device="cuda",
                      turn_outputs_batch=None, unfinished_batch=None):
    rewards = torch.zeros(len(completions), device=device)
    for idx, response in enumerate(completions):
        gt, calls = gt_batch[idx // num_gen], sum(turn.count("<tool_call>") for turn in turn_outputs_batch[idx])
        names = {tool["function"]["name"] for tool in tools_batch[idx // num_gen]}
        rewards[idx] += 0.5 if calls == len(gt) and names == {"calculate_math"} else -0.5
        rewards[idx] += 2.5 * sum(text in response for text in gt) / len(gt) - 0.5 * unfinished_batch[idx]
    return rewards
"""


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """minimind's `out/agent_128.pth` beside its `model/` with a tokenizer."""
    root = tmp_path_factory.mktemp("minimind")
    weights = root / "out" / "agent_128.pth"
    weights.parent.mkdir()
    of_model = shutil.ignore_patterns("*.safetensors", "config.json", "generation_config.json")
    shutil.copytree(bundled_model(), root / "model", ignore=of_model)
    vocabulary = json.loads((bundled_model() / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    torch.save(native_weights(vocabulary), weights)
    return weights


@pytest.mark.slow
def test_a_model_is_imported_trained_on_a_file_and_goes_back(native: Path, cli: Cli) -> None:
    cli("import", "minimind", str(native), "hf")

    def assert_same(own: Path, name: str, atol: float) -> None:
        weights = torch.load(own, weights_only=True)
        weights = {name: weight.float() for name, weight in weights.items()}
        other = AutoModelForCausalLM.from_pretrained(cli.folder / name, dtype=torch.float32)
        ids = torch.arange(5, 45)[None]
        assert torch.allclose(native_logits(weights, ids), other(ids).logits, atol=atol)

    assert_same(native, "hf", 1e-4)
    own = torch.load(native, weights_only=True)
    untied = native.with_name("untied.pth")
    torch.save({**own, "lm_head.weight": -own["lm_head.weight"]}, untied)
    cli("import", "minimind", str(untied), "untied")
    assert_same(untied, "untied", 1e-4)
    (cli.folder / "rows.jsonl").write_text(json.dumps({"conversations": CALLED}) + "\n")
    cli("init", "--min-level", "ns", "minimind-task", "p", "--model", "hf")
    at = ("--project", "p", "--set", "model.device=cpu")
    cli("sft", "tuned", "--data", "rows.jsonl", "--steps", "2", *at)
    few = """rollout.prompts_per_step=1 rollout.group_size=2 rollout.max_new_tokens=8
             model.chat.append_only=true algo.skip.zero_variance=false"""
    less = [word for one in few.split() for word in ("--set", one)]
    cli("train", "--model", str(cli.folder / "tuned"), "--steps", "1", *at, *less)
    cli("eval", "--limit", "1", "-k", "1", *at, *less)
    cli("merge", "last", "merged", "--project", "p")
    cli("import", "minimind", "merged", "back.pth")
    assert_same(cli.folder / "back.pth", "merged", 0.05)  # half precision


def test_what_cannot_be_imported_is_named(native: Path, cli: Cli) -> None:
    experts = {"model.layers.0.mlp.experts.0.gate_proj.weight": torch.zeros(1)}
    torch.save(experts, cli.folder / "moe.pth")
    cli("import", "minimind", "moe.pth", "x", code=2, said="mixture of experts")
    said = "--tokenizer does nothing where OUT is a .pth file"
    cli("import", "minimind", "moe.pth", "x.pth", "--tokenizer", "t", code=2, said=said)
    folder, about = cli.folder / "native", {"model_type": "minimind", "num_attention_heads": HEADS}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "pytorch_model.bin").write_bytes(native.read_bytes())
    with pytest.raises(ModelError, match="minimind's own form") as refused:
        load_model(folder, ModelConfig(), base=folder)
    assert "agentrl import minimind" in refused.value.hint
    assert convert(folder, cli.folder / "y", native.parent.parent / "model") > 0
    (folder / "config.json").write_text('{"num_attention_heads": ')
    with pytest.raises(ModelError, match=r"config\.json is not a JSON object"):
        convert(folder, cli.folder / "z")
    torch.save({"model.embed_tokens.weight": torch.zeros(1)}, cli.folder / "half.pth")
    with pytest.raises(ModelError, match=r"it lacks model\.layers\.0\.self_attn\.q_proj"):
        convert(cli.folder / "half.pth", cli.folder / "back.pth")


NATIVE = """
import torch
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class MiniMindConfig(PretrainedConfig):
    model_type = "minimind"

    def __init__(self, hidden_size=64, num_hidden_layers=2, vocab_size=300, **kwargs):
        super().__init__(**kwargs)
        self.hidden_size, self.num_hidden_layers, self.vocab_size = hidden_size, num_hidden_layers, vocab_size


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(2))
        self.scale = None

    def forward(self, input_ids, use_cache=False, **kwargs):
        if self.scale is None:  # made in the first forward
            self.scale = torch.ones(1)
        hidden = self.embed_tokens(input_ids) * self.scale
        for layer in self.layers:
            hidden = hidden + layer(hidden).cumsum(1).tanh()
        return hidden, [None, None], 0.0


class MiniMindForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = MiniMindConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, use_cache=False, **kwargs):
        hidden, past, _ = self.model(input_ids, use_cache=use_cache)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden), hidden_states=hidden)
"""


def test_its_own_code_runs_only_if_it_is_trusted(tmp_path: Path) -> None:
    (tmp_path / "model_minimind.py").write_text(NATIVE)
    module = load_file(tmp_path / "model_minimind.py")
    module.MiniMindForCausalLM(module.MiniMindConfig()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    classes = {"AutoConfig": "MiniMindConfig", "AutoModelForCausalLM": "MiniMindForCausalLM"}
    config["auto_map"] = {name: f"model_minimind.{kind}" for name, kind in classes.items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"runs code of its own, model_minimind\.py") as refused:
        load_model(tmp_path, ModelConfig(), base=tmp_path)
    for words in ("model.trust_remote_code=true", "import minimind"):
        assert words in refused.value.hint
    model = load_model(tmp_path, ModelConfig(trust_remote_code=True, device="cpu"), base=tmp_path)
    with torch.inference_mode():
        model(torch.zeros(1, 3, dtype=torch.long))
    assert way_of(model) == "padded"


def test_a_run_of_minimind_3_is_planned(cli: Cli) -> None:
    sizes: dict[str, Any] = {
        **{"hidden_size": 768, "num_hidden_layers": 8, "vocab_size": 6400, "head_dim": 96},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 2432},
        "tie_word_embeddings": True,
    }
    Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"]).save_pretrained(cli.folder)
    words = ("train", "--dry-run", "--model", ".", "--set", "task.packs=[minimind-task]")
    cli(*words, said="63,9")  # minimind-3 has 64 million parameters


async def test_its_tools_rewards_and_rows(tmp_path: Path) -> None:
    rewards = {"r": {"primary": True, "function": "task.py:calculate_rewards"}}
    spec = {"tools": ["task.py:MOCK_RESULTS"], "rewards": rewards}
    made = pack(tmp_path, spec, [AGENT], task=CODE)
    (shown,) = made.tools_of(made.tasks("train")[0])
    assert shown.schema["function"]["description"] == "计算数学表达式", "the row's schema"
    done = await play(made, [call("calculate_math", expression="2+3"), "It is 5."])
    assert [r.text for t in done.turns for r in t.results] == ['{"result": "5"}']
    assert done.outcome is Outcome.SOLVED and done.reward_parts[0].value == 3.0


def test_rows_of_rlaif_and_rows_that_cannot_be() -> None:
    said = [{"content": "Hello"}, {"content": "Hi"}, {"content": "More"}]
    prompt = normal({"conversations": said})["prompt"]
    assert [message["role"] for message in prompt] == ["user", "assistant"]
    for conversations, words in (
        (AGENT["conversations"][:2], "the last one a placeholder"),
        ([], "at least"),
    ):
        with pytest.raises(DataError, match=words):
            normal({"conversations": conversations})


def test_the_pack_that_ships_is_whole() -> None:
    own = vars(load_file(find_pack("minimind-task") / "test_task.py"))
    checks = [check for name, check in own.items() if name.startswith("test_")]
    assert len(checks) > 2
    for check in checks:
        check()
    published = Path(__file__).with_name("schemas.jsonl").read_text(encoding="utf-8")
    tools = {f"minimind-task/{tool.name}": tool.schema for tool in load_pack("minimind-task").tools}
    lines = [json.dumps({name: schema}, ensure_ascii=False) for name, schema in tools.items()]
    assert lines == published.splitlines(), "part of the prompt that trained models know"
