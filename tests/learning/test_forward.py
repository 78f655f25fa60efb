"""The packed forward gives the numbers and gradients of one episode at a time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli.config.models import LoraConfig
from agentrl_cli.errors import ModelError
from agentrl_cli.learning import forward, fused_forward
from agentrl_cli.learning.attention import Block, _FlashBlocks, _masked_blocks
from agentrl_cli.learning.fused_layer import product
from agentrl_cli.learning.logprobs import head_logprobs
from agentrl_cli.learning.packing import Packed, Rows, Segment, micro_batches, pack, select_segments
from agentrl_cli.learning.update import Learner
from agentrl_cli.models.adapter import add_adapter, switch_length
from benchmarks.architectures import build
from tests.helpers import local
from tests.helpers.graph_tape import Mode
from tests.helpers.local import LONGROPE
from tests.helpers.train import VOCABULARY
from tests.learning.test_update import config, episodes

VOCAB = 64
OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"attention_bias": True, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 6},
}


def tiny(kind: str = "qwen3", **changes: Any) -> Any:
    if kind == "falcon":  # its attention cannot be packed, as gemma2's
        return build("FalconForCausalLM").double().train()
    given = {"vocab_size": VOCAB, "initializer_range": 0.3, **OWN.get(kind, {}), **changes}
    return local.tiny(kind, **given).double().train()


def episode(rng: np.random.Generator, prompt: np.ndarray, n: int, gap: bool = True) -> Segment:
    ids = np.concatenate([prompt, rng.integers(0, VOCAB, n)]).astype(np.int32)
    trained = np.arange(len(ids)) >= len(prompt)
    if gap and n > 6:
        trained[len(prompt) + 2 : len(prompt) + 5] = False  # a tool result in between
        trained[-1] = False
    return Segment(ids, trained)


def batch(seed: int = 0) -> list[list[Segment]]:
    rng = np.random.default_rng(seed)
    groups = [
        [episode(rng, prompt, n) for n in (9, 1, 14, 7)]
        for prompt in rng.integers(0, VOCAB, (2, 11))
    ]
    twin = episode(rng, rng.integers(0, VOCAB, 5), 8)
    untrained = Segment(twin.ids, np.zeros(len(twin.ids), bool))
    return [
        *groups,
        [twin, twin, untrained],
        [episode(rng, rng.integers(0, VOCAB, 3), 4)],
        [untrained],
    ]


def one_at_a_time(
    model: Any, groups: list[list[Segment]], temperature: float = 1.0
) -> tuple[Any, Any]:
    logps, entropies = [], []
    for segment in (s for group in groups for s in group):
        ids = torch.from_numpy(segment.ids.astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature
        every = torch.log_softmax(logits, -1, torch.promote_types(model.dtype, torch.float32))
        where = torch.from_numpy(segment.trained[1:])
        logps.append(every.gather(-1, ids[1:, None])[:, 0][where])
        entropies.append(-(every.exp() * every).sum(-1)[where])
    return torch.cat(logps), torch.cat(entropies)


def backward(loss: Any) -> None:
    loss.backward()


def gradients(model: Any, logp: Any, entropy: Any) -> dict[str, torch.Tensor]:
    weights = torch.linspace(-1, 1, len(logp), dtype=torch.float64)
    model.zero_grad()
    backward((logp * weights).sum() + 0.3 * (entropy * weights.flip(0)).sum())
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(
    model: Any,
    groups: list[list[Segment]],
    *,
    share: bool = True,
    temperature: float = 1.0,
    checkpoint: bool = False,
) -> None:
    expected = one_at_a_time(model, groups, temperature)
    wanted = gradients(model, *expected)
    packed = pack(groups if share else [[one] for group in groups for one in group])
    got = forward.logprobs(model, packed, temperature=temperature, chunk=7, checkpoint=checkpoint)
    for mine, plain in zip((got.logp, got.entropy), expected, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5, check_dtype=False)
    found = gradients(model, got.logp, got.entropy)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm() / (gradient.norm() + 1e-12)) < 1e-5, name


@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral"])
@pytest.mark.parametrize("share", [True, False])
def test_packed_equals_one_at_a_time(kind: str, share: bool) -> None:
    assert_same(tiny(kind), batch(), share=share)


@pytest.mark.parametrize("kind", ["falcon", "gemma2"])
def test_what_cannot_be_packed_is_padded_and_logged(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny(kind)
    assert_same(model, batch(), temperature=0.8)
    forward.logprobs(model, pack(batch()))
    assert caplog.text.count("episodes are padded") == 1


def test_an_unknown_kind_of_layer_is_not_trusted() -> None:
    model = tiny()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ModelError, match="chunked_attention"):
        forward.logprobs(model, pack(batch()))


def test_temperature_and_checkpointing() -> None:
    model = tiny()
    assert_same(model, batch(1), temperature=0.7, checkpoint=True)
    assert model.config._attn_implementation == "sdpa"
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    backward(forward.logprobs(model.eval(), pack(batch()), checkpoint=True).logp.sum())
    assert not any(m.training for m in model.modules())


def test_adapter() -> None:
    from peft import LoraConfig, get_peft_model

    given: dict[str, Any] = {"r": 2, "init_lora_weights": False}
    every = LoraConfig(target_modules="all-linear", **given)
    assert_same(get_peft_model(tiny(), every).double(), batch())
    head = LoraConfig(target_modules=["lm_head", "q_proj"], **given)
    assert_same(get_peft_model(tiny("llama"), head).double(), batch())


def test_bfloat16_is_as_close_as_its_own_rounding() -> None:
    model = tiny().to(torch.bfloat16)
    got = forward.logprobs(model, pack(batch()))
    backward(got.logp.sum())
    assert got.logp.dtype == torch.float32
    with torch.no_grad():
        alone = one_at_a_time(model, batch())[0]
        exact = one_at_a_time(model.float(), batch())[0]
        off, rounding = (got.logp - exact).abs(), (alone - exact).abs()
    assert 0 < off.mean() < 1.5 * rounding.mean()


def test_sharing_computes_the_prompt_once() -> None:
    rng = np.random.default_rng(0)
    rest = [
        np.r_[np.arange(20), [20 + i], rng.integers(30, 60, 5)].astype(np.int32) for i in range(4)
    ]
    group = [Segment(ids, np.arange(26) > 20) for ids in rest]
    packed = pack([group])
    # the last trained token predicts nothing
    assert (packed.tokens, pack([[one] for one in group]).tokens) == (20 + 4 * 5, 4 * 25)
    assert packed.blocks == (Block(0, 20, (25, 30, 35, 40)),)
    assert packed.position_ids[18:27].tolist() == [18, 19, 20, 21, 22, 23, 24, 20, 21]


def test_episodes_that_agree_beyond_the_prompt_share_that_too() -> None:
    same = [np.r_[np.arange(10), tail].astype(np.int32) for tail in ([11, 12], [13, 14])]
    packed = pack([[Segment(ids, np.arange(12) >= 6) for ids in same]])
    assert packed.tokens == 10 + 2
    assert packed.rows.tolist() == [5, 6, 7, 8, 9, 10, 5, 6, 7, 8, 9, 11]


def test_micro_batches_cover_everything_within_the_budget() -> None:
    groups = batch()
    for budget in (12, 30, 60, 10_000):
        rows = micro_batches(groups, budget)
        assert sorted(pair for row in rows for pair in row) == [
            (g, m) for g in range(5) for m in range(len(groups[g]))
        ]
        for row in rows:
            assert pack(select_segments(groups, row)).tokens <= budget or len(row) == 1
    assert len(micro_batches(groups, 10_000)) == 1


def test_episodes_whose_positions_depend_on_the_length_are_computed_as_alone() -> None:
    model, rng = tiny("Phi3", **LONGROPE), np.random.default_rng(0)
    prompt = rng.integers(0, VOCAB, 40)
    groups = [[episode(rng, prompt, n) for n in (160, 20, 100, 9)], [episode(rng, prompt, 30)]]
    rows = micro_batches(groups, 10_000, switch=switch_length(model))
    assert (
        rows == [[(0, 1), (0, 3)], [(0, 0), (0, 2)], [(1, 0)]]
        and len(micro_batches(groups, 10_000)) == 1
    )
    scales = {"short_mscale": 1.0, "long_mscale": 1.3}  # of Phi-3.5-MoE, which is padded
    changes = {**LONGROPE, "rope_parameters": {**LONGROPE["rope_parameters"], **scales}}
    padded = build("PhimoeForCausalLM", vocab_size=VOCAB, max_position_embeddings=512, **changes)
    for made, way in ((model, "packed"), (padded, "padded")):
        assert forward.way_of(made) == way
        for row in rows:
            with torch.no_grad():
                found = forward.trained_logprobs(made, select_segments(groups, row))[1].logp
                alone = [forward.trained_logprobs(made, [[groups[g][m]]])[1].logp for g, m in row]
            torch.testing.assert_close(found, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_dynamic_rope_is_tried_within_the_positions_of_the_model() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = tiny("llama", max_position_embeddings=64, rope_parameters=rope)
    assert forward.way_of(model) == "packed"
    assert (
        model.model.rotary_emb.max_seq_len_cached == 64
    )  # beyond, later forwards would have other positions


def test_nothing_to_train() -> None:
    packed = pack([[Segment(np.arange(5, dtype=np.int32), np.zeros(5, bool))]])
    assert packed.tokens == pack([]).tokens == 0
    assert forward.logprobs(tiny(), packed).logp.shape == (0,)


def test_a_trained_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing precedes"):
        pack([[Segment(np.arange(3, dtype=np.int32), np.ones(3, bool))]])


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_head_against_autograd_in_double(chunk: int, softcap: float | None) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(6, 11).double()
    hidden = (4 * torch.randn(9, 6, dtype=torch.float64)).requires_grad_()
    targets, weights = torch.randint(0, 11, (9,)), torch.randn(2, 9, dtype=torch.float64)
    logits = head(hidden)
    bounded = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    every = torch.log_softmax(bounded / 0.8, -1)
    plain = every[torch.arange(9), targets], -(every.exp() * every).sum(-1)
    own = head_logprobs(head, hidden, targets, temperature=0.8, softcap=softcap, chunk=chunk)
    leaves = [hidden, head.weight, head.bias]
    found = [
        [*both, *torch.autograd.grad((weights * torch.stack(both)).sum(), leaves)]
        for both in (own, plain)
    ]
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


class Shapes(Mode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= {
            tuple(t.shape)
            for t in (out if isinstance(out, (tuple, list)) else [out])
            if torch.is_tensor(t)
        }
        return out


@pytest.mark.parametrize("frozen", [True, False])
def test_no_tensor_has_the_vocabulary_of_more_tokens_than_a_chunk(frozen: bool) -> None:
    """In both directions; [32, 97] is the head's weight turned round, which no token has a part in."""
    model, packed = tiny(vocab_size=97), pack(batch())
    model.get_output_embeddings().weight.requires_grad_(not frozen)
    forward.way_of(model)  # the trial compares whole logits, once
    with Shapes() as shapes:
        out = forward.logprobs(model, packed, chunk=7)
        backward(out.logp.sum() + out.entropy.sum())
    wide = {shape for shape in shapes.seen if 97 in shape[1:]} - {(32, 97)}
    assert (7, 97) in wide and len(packed.rows) > 28
    assert max(int(np.prod(shape)) // 97 for shape in wide) == 7


def test_a_group_beyond_the_budget_computes_its_prompt_once_if_memory_allows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ids = np.arange(40, dtype=np.int32) % VOCAB
    group = [Segment(np.append(ids, [np.int32(m)] * 3), np.arange(43) >= 40) for m in range(4)]
    (row,) = Rows(45, lambda: (60, 60)).of([group])
    assert len(row) == 4 and pack(select_segments([group], row)).tokens < 60 and not caplog.text
    assert len(Rows(45).of([group])) == 2 and "computed more than once" in caplog.text


def test_private_operators_of_torch_equal_the_public_ones() -> None:
    draw = torch.Generator().manual_seed(0)
    blocks = (Block(0, 3, (5, 9)), Block(9, 9, (12,)))
    q, k, v, weights = torch.randn(4, 1, 4, 12, 8, generator=draw, dtype=torch.float64)
    given = [part.requires_grad_() for part in (q, k, v)]
    outs = (
        _FlashBlocks.apply(*given, blocks, 0.3),  # type: ignore[no-untyped-call]
        _masked_blocks(q, k, v, blocks, 0.3, 0.0, None),
    )
    found = [[out, *torch.autograd.grad((out * weights).sum(), given)] for out in outs]
    for private, public in zip(*found, strict=True):
        torch.testing.assert_close(private, public, rtol=1e-10, atol=1e-10)

    x, weight, bias = (torch.randn(*shape, generator=draw) for shape in ((7, 16), (5, 16), (5,)))
    torch.testing.assert_close(product(x, weight, bias), x @ weight.T + bias)


# --- our own forward under an adapter, against that of transformers and peft ---


def make(family: str, dtype: torch.dtype = torch.float32, **adapter: Any) -> Any:
    more = {"sliding_window": None} if family == "mistral" else {}
    model = local.tiny(family, vocab_size=VOCABULARY, **more).to(dtype)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 0.1 * torch.randn_like(tensor)
    adapted: Any = add_adapter(model, LoraConfig(enabled=True, r=4, alpha=8, **adapter), Path())
    with torch.no_grad():
        for name, tensor in adapted.named_parameters():
            if "lora_" in name:
                tensor.copy_(0.2 * torch.randn_like(tensor))
    return adapted


def row(seed: int = 0) -> Packed:
    """Two groups, sharing prompts; answers of several turns, so that some positions predict nothing that is trained."""
    rng = np.random.default_rng(seed)
    groups = []
    for size in (1, 3):
        prompt, group = rng.integers(5, VOCABULARY, 7), []
        for _ in range(size):
            said = rng.integers(5, VOCABULARY, int(rng.integers(6, 14)))
            mask = np.concatenate([np.zeros(7, bool), rng.random(len(said)) < 0.6])
            mask[7] = True
            group.append(Segment(np.concatenate([prompt, said]).astype(np.int32), mask))
        groups.append(group)
    return pack(groups)


def compare(
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    logp: float,
    gradient: float,
    checkpoint: bool = False,
) -> None:
    """Our forward of `row()` against transformers': log-probabilities and gradients, within these bounds."""
    found, packed = [], row()
    assert used(model, packed)
    for ours in (True, False):
        with monkeypatch.context() as patch:
            if not ours:
                # the way of models that it does not serve; the two are compared on one model
                patch.setattr(forward, "fused_states", lambda *given, **more: None)
            model.zero_grad()
            out = forward.logprobs(model, packed, temperature=0.9, checkpoint=checkpoint)
            weight = torch.randn(len(out.logp), generator=torch.Generator().manual_seed(1))
            backward((out.logp * weight).sum() + 0.3 * out.entropy.sum())
            grads = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
            found.append((out.logp.detach(), torch.cat(grads)))
    (mine, slope), (theirs, wanted) = found
    assert float((mine - theirs).abs().max()) < logp
    assert float((slope - wanted).norm() / wanted.norm()) < gradient


def used(model: Any, packed: Packed) -> bool:
    return fused_forward.fused_states(model.get_base_model(), packed, checkpoint=False) is not None


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_numbers_and_gradients_are_the_models_own(
    family: str, checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(make(family, torch.float64), monkeypatch, 2e-6, 1e-5, checkpoint)


@pytest.mark.parametrize(
    ("dtype", "logp", "gradient"), [(torch.float32, 1e-4, 1e-4), (torch.bfloat16, 0.15, 0.05)]
)
def test_in_float32_by_prepacked_products_and_in_bfloat16(
    dtype: torch.dtype, logp: float, gradient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("qwen3", dtype)
    compare(model, monkeypatch, logp, gradient)
    names = {name for name, p in model.named_parameters() if p.grad is not None}
    assert names and all("lora_" in name for name in names)


def test_some_projections_and_rslora_and_the_adapter_off(monkeypatch: pytest.MonkeyPatch) -> None:
    some: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}
    model, packed = make("qwen3", torch.float64, **some), row()
    compare(model, monkeypatch, 2e-6, 1e-5)
    with torch.no_grad():
        adapted = forward.logprobs(model, packed).logp
        with model.disable_adapter():
            plain = forward.logprobs(model, packed).logp
            assert torch.equal(plain, forward.logprobs(model.get_base_model(), packed).logp)
    assert float((plain - adapted).abs().max()) > 1e-3


@pytest.mark.parametrize("what", ["dora", "dropout", "full", "hook"])
def test_what_it_does_not_know_takes_the_models_own_forward(what: str) -> None:
    peft: dict[str, dict[str, Any]] = {"dora": {"use_dora": True}, "dropout": {"dropout": 0.5}}
    model, packed = make("qwen3", **peft.get(what, {})), row()
    model.train()
    if what == "full":
        model.requires_grad_(True)
    if what == "hook":
        model.get_base_model().model.layers[0].register_forward_hook(lambda *given: None)
    assert not used(model, packed)
    assert torch.isfinite(forward.logprobs(model, packed).logp).all()
    if what == "dropout":
        model.eval()
        assert used(model, packed)


def test_a_model_whose_numbers_differ_is_not_run_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, packed = make("qwen3"), row()
    layer = type(model.get_base_model().model.layers[0].mlp)
    # as a later transformers would change it
    monkeypatch.setattr(
        layer,
        "forward",
        lambda self, x: 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * x.mean()),
    )
    assert not used(model, packed)


@pytest.mark.parametrize("lora", [True, False])
def test_training_in_bfloat16_learns(lora: bool) -> None:
    model = make("qwen3", torch.bfloat16)
    if not lora:
        model = model.unload().requires_grad_(True)
    groups = episodes(model, [[0, 1, 1, 0], [1, 0, 0, 1]])
    learner = Learner(model, config(train={"lr": 2e-2 if lora else 3e-3}))
    updates = [learner.update(groups, step) for step in range(9)]
    assert all(np.isfinite(update.metrics["grad_norm"]) for update in updates)
    first, last = (
        np.mean(
            [
                (e.graded_reward - 0.5) * np.nanmean(update.signals[e.id].logp_train)
                for group in groups
                for e in group
            ]
        )
        for update in (updates[0], updates[-1])
    )
    assert last > first + 0.02
    kinds = {("adapter" if "lora_" in n else "base"): p.dtype for n, p in model.named_parameters()}
    assert kinds["base"] is torch.bfloat16 and kinds.get("adapter", torch.float32) is torch.float32
