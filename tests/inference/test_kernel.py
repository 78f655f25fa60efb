"""Compiled code of a decoding batch: attention and draws beside torch's, and what happens without a compiler."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from agentrl_cli.policies import local_compile, local_kernel
from agentrl_cli.policies.local import LocalPolicy
from agentrl_cli.policies.local_bases import Base
from agentrl_cli.policies.local_cache import Shelf
from agentrl_cli.policies.local_engine import choose_engine, sampling_mode, verify
from agentrl_cli.policies.local_kernel import WIDEST, Ragged, draw_plain, library, why_not
from agentrl_cli.policies.local_sampling import draw
from agentrl_cli.types import TOP_K, Generation, Sampling
from tests.helpers.local import tiny

compiled = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a compiler")


@pytest.fixture
def anew() -> Iterator[None]:
    """What was found out about the compiler is forgotten, before and after."""
    for found in (library, local_kernel._build):
        found.cache_clear()
    yield
    for found in (library, local_kernel._build):
        found.cache_clear()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@compiled
@pytest.mark.parametrize("dim", [6, 12, 32, 64, 80, 96, 128, 256, WIDEST])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"),
    [(1, 1, 1), (2, 2, None), (6, 1, 5), (6, 2, 7), (7, 1, None), (16, 2, 6), (10, 2, 40)],
)
def test_attention_is_torchs(dim: int, heads: int, kv_heads: int, window: int | None) -> None:
    """Three rows on two shelves, one of them begins with what is kept apart; 1, 4 and 2 new tokens."""
    torch.manual_seed(dim + heads)
    scale = 0.3 if dim <= 128 else dim**-0.5
    lengths, begun, counts = (20, 37, 9), (0, 5, 0), (1, 4, 2)
    shelves = [Shelf(64, 1), Shelf(32, 1), Shelf(32, 1)]
    bases = [None, Base(np.zeros(5, np.int32), shelves[1], 1, ""), None]
    places = [(shelves[0], 1), (shelves[0], 0), (shelves[2], 2)]
    for shelf in shelves:
        shelf.resize(3)
        shelf.stores(0, torch.zeros(1, kv_heads, 1, dim), torch.zeros(1, kv_heads, 1, dim))
    cos, sin = torch.randn(64, dim), torch.randn(64, dim)
    norms = (torch.rand(dim), torch.rand(dim)) if dim == 12 else (None, None)
    ends, wanted, fed = np.cumsum(counts), [], []
    for (shelf, row), base, own, length, new in zip(places, bases, begun, lengths, counts, strict=True):
        mixed = torch.randn(length, heads + 2 * kv_heads, dim)
        q, k, v = mixed.tensor_split((heads, heads + kv_heads), 1)
        q, k = (x if n is None else rms_norm(x, n.shape, n, 1e-6) for x, n in zip((q, k), norms, strict=True))
        q, k = (turned(x, cos[:length, None], sin[:length, None]) for x in (q, k))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        if base is not None:
            base.shelf.fill([base.row], [(k, v)], own)
        shelf.fill([row], [(k[:, own:], v[:, own:])], length - own - new)
        far = torch.arange(length)[:, None] - torch.arange(length)[None]
        seen = (far >= 0) & (far < (window or 1000))
        out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, scale=scale, enable_gqa=True)[0]
        wanted.append(out[:, -new:].transpose(0, 1).reshape(new, -1))
        fed.append(mixed[-new:])
    view = Ragged(places, [n - new for n, new in zip(lengths, counts, strict=True)], counts, bases)
    assert view.last is not None and view.last.tolist() == (ends - 1).tolist()
    sizes = {"heads": heads, "kv_heads": kv_heads}
    got = view.attend(
        0, torch.cat(fed).contiguous(), cos, sin, **sizes, scale=scale, window=window, norms=norms, eps=1e-6
    )
    torch.testing.assert_close(got, torch.cat(wanted), atol=2e-5, rtol=1e-5)


@compiled
def test_heads_that_are_too_wide_take_tensor_operations() -> None:
    """The compiled sums hold so many numbers of a head and no more."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    for dim, packs in ((WIDEST, True), (2 * WIDEST, False)):
        engine = choose_engine(tiny("llama", head_dim=dim, **sizes))
        assert (engine.name, engine.packs) == ("fused", packs)


@compiled
def test_norms_of_another_dtype() -> None:
    """Their weights are copied as float32: compiled code reads nothing else."""
    model = tiny("qwen3")
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.bfloat16()
    engine = choose_engine(model)
    assert (engine.name, engine.packs, engine.why) == ("fused", True, "")


@compiled
def test_compiled_attention_of_no_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    engine = choose_engine(model)
    packed, whole = engine.packs, Ragged.attend
    monkeypatch.setattr(Ragged, "attend", lambda *given, **more: whole(*given, **more).fill_(torch.nan))
    with sampling_mode(model):
        verify(engine, model)
    assert packed and not engine.packs and "differs" in engine.why


@compiled
def test_numbers_that_are_none_stay_so() -> None:
    shelf = Shelf(32, 1)
    shelf.resize(1)
    mixed, angles = torch.full((3, 3, 8), torch.nan), torch.ones(32, 8)
    out = Ragged([(shelf, 0)], [0], [3], [None]).attend(0, mixed, angles, angles, heads=1, kv_heads=1, scale=1.0)
    assert bool(out.isnan().all())


def sampled(model: object) -> tuple[LocalPolicy, list[Generation]]:
    """Two turns of five episodes, three of which begin alike."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 96, n).tolist() for n in (40, 40, 40, 7, 21)]
    prompts[1] = prompts[2] = prompts[0]

    async def go() -> tuple[LocalPolicy, list[Generation]]:
        policy = LocalPolicy(model, context_length=256)
        said: list[Generation] = []
        for turn in range(2):
            asked = [Sampling(max_new_tokens=6 + 3 * n, seed=10 * turn + n) for n in range(5)]
            every = await asyncio.gather(*(policy.generate(str(n), ids, asked[n]) for n, ids in enumerate(prompts)))
            prompts[:] = [ids + one.ids.tolist() + [20, 21, 22] for ids, one in zip(prompts, every, strict=True)]
            said += every
        await policy.close()
        return policy, said

    return asyncio.run(go())


def test_without_a_compiler_the_same_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, anew: None) -> None:
    model = tiny("qwen3")
    with_it, fast = sampled(model)
    library.cache_clear()
    local_kernel._build.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    without, slow = sampled(model)
    assert (without.engine, without.engine_why) == ("fused", "there is no C compiler")
    assert with_it.prefill_tokens == without.prefill_tokens
    for mine, other in zip(fast, slow, strict=True):
        assert mine.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(mine.logp_policy, other.logp_policy, atol=1e-4)


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, anew: None) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'no such processor' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert library() is None and why_not() == "its code could not be compiled: no such processor"
    library.cache_clear()
    local_kernel._build.cache_clear()
    compiler.write_text("#!/bin/sh\nprintf '\\n\\377' >&2\nprintf '\\n' >&2\nexit 1\n")  # no UTF-8
    assert library() is None and why_not().startswith("its code could not be compiled: ")
    library.cache_clear()
    local_kernel._build.cache_clear()
    compiler.write_text("#!/bin/sh\necho >&2\nexit 1\n")  # an empty line is all it says
    assert library() is None and "returned non-zero exit status 1" in why_not()
    assert list((tmp_path / "cache" / "agentrl").iterdir()) == []


@compiled
def test_it_is_compiled_once_into_a_folder_of_the_users_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, anew: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library() is not None
    (made,) = (tmp_path / "agentrl").iterdir()
    stamp = made.stat().st_mtime_ns
    library.cache_clear()
    local_kernel._build.cache_clear()
    assert library() is not None and made.stat().st_mtime_ns == stamp
    (tmp_path / "agentrl").chmod(0o777)
    library.cache_clear()
    local_kernel._build.cache_clear()
    assert library() is None and "can be written by others" in why_not()


def forget() -> None:
    library.cache_clear()
    local_kernel._build.cache_clear()


def test_a_compiler_that_hangs_costs_one_wait_and_is_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, anew: None
) -> None:
    """Its children hold the pipes open, as a compiler's do: they are ended with it."""
    compiler, tried = tmp_path / "cc", tmp_path / "tried"
    compiler.write_text(f"#!/bin/sh\necho x >> {tried}\nsleep 300 &\nwait\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(local_compile, "SECONDS", 0.5)
    monkeypatch.setattr(local_compile, "AGAIN", 0.2)
    started = time.monotonic()
    assert library() is None and why_not() == f"{compiler} did not end within 0.5 seconds"
    assert library() is None and time.monotonic() - started < 5
    assert tried.read_text() == "x\n", "without OpenMP it is not tried"
    forget()  # the next process
    assert library() is None and "hung when it was last tried" in why_not() and tried.read_text() == "x\n"
    (mark,) = (tmp_path / "cache" / "agentrl").iterdir()
    os.utime(mark, (0, 0))
    forget()  # a day later: a shorter chance
    assert why_not() == f"{compiler} did not end within 0.2 seconds" and tried.read_text() == "x\nx\n"
    compiler.write_text("#!/bin/sh\necho 'no such processor' >&2\nexit 1\n")
    forget()  # another compiler in its place has nothing to do with that
    assert why_not() == "its code could not be compiled: no such processor"


@compiled
def test_a_kept_library_that_cannot_be_loaded_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, anew: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "whole"))
    assert why_not() == ""
    (made,) = (tmp_path / "whole" / "agentrl").iterdir()
    whole = made.read_bytes()
    for number, broken in enumerate((b"no library", whole[:100])):
        folder = tmp_path / str(number) / "agentrl"
        folder.mkdir(mode=0o700, parents=True)
        (folder / made.name).write_bytes(broken)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(number)))
        forget()
        assert library() is not None and why_not() == ""
        assert list(folder.iterdir()) == [folder / made.name]
        assert (folder / made.name).stat().st_size == len(whole)


def test_a_new_library_that_cannot_be_loaded_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, anew: None
) -> None:
    """What the compiler makes is no library: it is not tried for ever, and the reason is not OpenMP."""
    compiler, tried = tmp_path / "cc", tmp_path / "tried"
    script = f'#!/bin/sh\necho x >> {tried}\nwhile [ "$1" != -o ]; do shift; done\necho nothing > "$2"\n'
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert library() is None and tried.read_text() == "x\nx\n", "with threads and without"
    assert why_not().startswith("its compiled code could not be loaded: ") and "OpenMP" not in why_not()
    forget()  # kept, and made once more
    assert library() is None and tried.read_text() == "x\n" * 4


@compiled
def test_why_it_has_no_threads_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, anew: None) -> None:
    """Only without OpenMP what the compiler makes is a library: with several threads it is not used."""
    real = shutil.which("cc") or shutil.which("gcc")
    compiler, case = tmp_path / "cc", 'case "$*" in *-fopenmp*) {then} ;; esac'
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    ends = 'while [ "$1" != -o ]; do shift; done; echo nothing > "$2"; exit 0'
    for then, why in (("exit 1", "the C compiler has no OpenMP"), (ends, "with threads its compiled code could not")):
        compiler.write_text(f'#!/bin/sh\n{case.format(then=then)}\nexec {real} "$@"\n')
        compiler.chmod(0o755)
        forget()
        assert library() is not None
        assert why_not().startswith(why) and why_not().endswith(", and torch uses several threads")


@compiled
@pytest.mark.parametrize("vocabulary", [3, 64, 96, 512, 2000, 5003])
def test_plain_draws_are_those_of_torch(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    rows = 200
    logits = 3 * torch.randn(rows, vocabulary)
    logits[::3, : vocabulary // 2] = -torch.inf  # tokens that cannot be said
    logits[1, 1] += 1e4
    asked = [Sampling(temperature=0.5 + (n % 5) / 4) for n in range(rows)]
    numbers = np.random.default_rng(0).random(rows)
    numbers[:2], numbers[3] = 0.0, 1 - 2**-53
    wanted = draw(logits, asked, torch.from_numpy(numbers))
    drawn = draw_plain(logits, [one.temperature for one in asked], numbers.tolist())
    assert drawn is not None
    ids, known = drawn
    assert ids == wanted.ids.tolist()
    top = min(TOP_K, vocabulary)
    np.testing.assert_allclose(known[:, 0], wanted.logp_policy, atol=5e-6, rtol=1e-6)
    exact = (logits.double() / torch.tensor([[one.temperature] for one in asked])).log_softmax(-1)
    entropy = -(exact.exp() * exact.clamp(min=-1e6)).sum(-1)
    np.testing.assert_allclose(known[:, 1], entropy, atol=5e-6)
    np.testing.assert_allclose(known[:, 2 + top :], wanted.top_logps, atol=5e-6, rtol=1e-6)
    best = np.take_along_axis(logits.numpy(), np.ascontiguousarray(known[:, 2 : 2 + top]).view(np.int32), 1)
    np.testing.assert_array_equal(best, logits.topk(top, -1).values)


@compiled
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_a_draw_of_what_is_no_number_says_so(odd: float) -> None:
    logits = torch.zeros(1, 70)
    logits[0, 69] = odd
    drawn = draw_plain(logits, [1.0], [0.5])
    assert drawn is not None and not np.isfinite(drawn[1][:, :2]).all()
