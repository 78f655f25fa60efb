"""A SGLang server by its native API: `/generate` with `input_ids`, weights from disk, adapters by name.

https://docs.sglang.ai/basic_usage/native_api.html. Its log-probabilities are those of the distribution at the sampling
temperature, with penalties, before top-p, top-k and min-p. Every answer names the weights that made it, so a server
that returned to others is noticed: it loads them again, and the answer is not used.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_cli.errors import BadAnswer, PolicyError
from agentrl_cli.policies.remote.checked import (
    alternatives,
    finish,
    items,
    log_probabilities,
    part,
    shown,
    token_ids,
)
from agentrl_cli.policies.remote.http import MAX_BODY
from agentrl_cli.policies.remote.token_ids import Answer, IdServer, narrowed
from agentrl_cli.types import TOP_K, Float32, Sampling, StopReason

FINISH = {name: name for name in ("stop", "length", "abort")}
"""SGLang's finish reasons."""


class SGLangPolicy(IdServer):
    """`python -m sglang.launch_server --model-path MODEL` (with `--enable-lora` for adapters)."""

    name = "sglang"

    async def _ask(self, ids: list[int], sampling: Sampling) -> Answer:
        found, made_with = await self.endpoint.ask(
            "/generate", self._body(ids, sampling), partial(self._read, sampling)
        )
        if not self._current(made_with):
            await self._recover()
            again = partial(self._read, sampling)
            found, made_with = await self.endpoint.ask(
                "/generate", self._body(ids, sampling), again
            )
            if not self._current(made_with):
                raise PolicyError(
                    f"The server samples with the weights {made_with!r} and was given {self.weights_version!r}.",
                    hint="Does another trainer write into the same server?",
                )
        return found

    def _read(self, sampling: Sampling, answer: dict[str, Any]) -> tuple[Answer, str]:
        """Return an answer of `/generate`, and the weights that made it. Raises BadAnswer."""
        meta = part(answer, "meta_info")
        if meta.get("output_token_logprobs") is None:
            raise BadAnswer(
                "sends no token ids with log-probabilities, so it cannot be trained with"
            )
        pairs = _pairs(meta["output_token_logprobs"])
        out = token_ids([id_ for id_, _ in pairs], sampling, self.vocabulary)
        named = answer.get("output_ids")
        if named is not None and named != out:
            raise BadAnswer(f"sent other ids ({shown(named)}) than it sent log-probabilities of")
        logps = log_probabilities([logp for _, logp in pairs], len(out))
        tops = items(meta.get("output_top_logprobs"), "output_top_logprobs")
        found = alternatives(tops, len(out), _pairs, self.vocabulary)
        reason = finish(part(meta, "finish_reason").get("type"), FINISH)
        return (out, logps, found, _stop_reason(reason, out, sampling)), str(
            meta.get("weight_version", "")
        )

    def _body(self, ids: list[int], sampling: Sampling) -> dict[str, Any]:
        params: dict[str, Any] = {
            **narrowed(sampling),
            "max_new_tokens": sampling.max_new_tokens,
            "sampling_seed": sampling.seed % 2**31,
            "no_stop_trim": True,
        }
        body = {
            "input_ids": ids,
            "sampling_params": params,
            "return_logprob": True,
            "top_logprobs_num": TOP_K,
        }
        return {**body, "lora_path": self.model} if self.lora and self._folder is not None else body

    async def _take(self, folder: Path, version: str, label: str, old: str) -> None:
        root = self.endpoint.root
        if self.lora:
            url = f"{root}/load_lora_adapter"
            said = await self._load_adapter(url, folder, label)
            if said:
                _check(url, said)
            if old:
                await self._unload_adapter(f"{root}/unload_lora_adapter", old)
            return
        # The server drops its prefix cache with the old weights.
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": True}
        url = f"{root}/update_weights_from_disk"
        _check(url, await self.endpoint.command(url, body))

    def _current(self, made_with: str) -> bool:
        """Whether an answer was made with the published weights; adapters are requested by name."""
        return self.lora or self._folder is None or made_with in ("", self.weights_version)

    def _meaning(self, logps: Float32, sampling: Sampling) -> tuple[Float32, Float32]:
        if self.processed:
            return super()._meaning(logps, sampling)
        unknown = np.full_like(logps, np.nan)
        return (
            unknown if sampling.cut else logps,
            unknown.copy() if sampling.steered else logps.copy(),
        )


def _check(url: str, said: str) -> None:
    """Raise PolicyError unless a command succeeded, by its answer."""
    try:
        answer = json.loads(said)
    except ValueError:
        answer = {}
    if not isinstance(answer, dict) or not answer.get("success"):
        raise PolicyError(f"{url} did not take the weights: {said[:MAX_BODY]}")


def _pairs(row: Any) -> list[tuple[Any, Any]]:
    """(id, log-probability) of each entry, which SGLang sends as [log-probability, id, …]."""
    entries = items(row, "log-probabilities")
    if not all(isinstance(entry, list) and len(entry) > 1 for entry in entries):
        raise BadAnswer(f"sent log-probabilities without ids: {shown(row)}")
    return [(entry[1], entry[0]) for entry in entries]


def _stop_reason(reason: str, ids: list[int], sampling: Sampling) -> StopReason:
    if reason == "abort":
        return StopReason.CANCELLED
    if reason == "length":
        return StopReason.LENGTH
    own = bool(ids) and (ids[-1] in sampling.stop_ids or not sampling.stop_strings)
    return StopReason.STOP if own else StopReason.STOP_STRING
