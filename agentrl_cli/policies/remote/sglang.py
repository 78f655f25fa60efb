"""A SGLang server by its native API: `/generate` with `input_ids`, weights from disk, adapters by name.

https://docs.sglang.ai/basic_usage/native_api.html. Its log-probabilities are those of the distribution at the sampling
temperature, with penalties, before top-p, top-k and min-p. Every answer names the weights that made it, so a server
that went back to others is noticed: it gets them again, and what was sampled with the others is not used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.remote.http import MAX_BODY
from agentrl_cli.policies.remote.token_ids import Answer, IdServer, narrowed
from agentrl_cli.types import TOP_K, Float32, Sampling, StopReason


class SGLangPolicy(IdServer):
    """`python -m sglang.launch_server --model-path MODEL` (with `--enable-lora` for adapters)."""

    name = "sglang"

    async def _ask(self, ids: list[int], sampling: Sampling) -> Answer:
        answer = await self.endpoint.post("/generate", self._body(ids, sampling))
        meta = answer.get("meta_info") or {}
        if not self._ours(meta):
            await self._mend()
            answer = await self.endpoint.post("/generate", self._body(ids, sampling))
            meta = answer.get("meta_info") or {}
            if not self._ours(meta):
                raise PolicyError(
                    f"The server samples with the weights {meta.get('weight_version')!r} and was given "
                    f"{self.weights_version!r}.",
                    hint="Does another trainer write into the same server?",
                )
        pairs = meta.get("output_token_logprobs")
        if pairs is None:
            raise PolicyError("The server sends no token ids with log-probabilities, so it cannot be trained with.")
        out = [int(id_) for _, id_, *_ in pairs]
        told = answer.get("output_ids")
        if told is not None and [int(id_) for id_ in told] != out:
            raise PolicyError(f"The server sent {len(told)} ids and log-probabilities of {len(out)} others.")
        logps = np.asarray([np.nan if logp is None else logp for logp, *_ in pairs], np.float32)
        tops = [
            [(int(id_), float(logp)) for logp, id_, *_ in row or ()] for row in meta.get("output_top_logprobs") or []
        ]
        return out, logps, tops, _stop_reason(meta.get("finish_reason") or {}, out, sampling)

    def _body(self, ids: list[int], sampling: Sampling) -> dict[str, Any]:
        params: dict[str, Any] = {
            **narrowed(sampling),
            "max_new_tokens": sampling.max_new_tokens,
            "sampling_seed": sampling.seed % 2**31,
            "no_stop_trim": True,
        }
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "top_logprobs_num": TOP_K}
        return {**body, "lora_path": self.model} if self.lora and self._folder is not None else body

    async def _take(self, folder: Path, version: str, old: str) -> None:
        root = self.endpoint.root
        if self.lora:
            url = f"{root}/load_lora_adapter"
            said = await self._load_adapter(url, folder, version)
            if said:
                _check(url, said)
            if old:
                await self.endpoint.command(f"{root}/unload_lora_adapter", {"lora_name": old})
            return
        # It drops its prefix cache by itself with the old weights.
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": True}
        url = f"{root}/update_weights_from_disk"
        _check(url, await self.endpoint.command(url, body))

    def _ours(self, meta: dict[str, Any]) -> bool:
        """Whether an answer was made with the weights that we gave; adapters are asked for by name."""
        return self.lora or self._folder is None or meta.get("weight_version", "") in ("", self.weights_version)

    def _meaning(self, logps: Float32, sampling: Sampling) -> tuple[Float32, Float32]:
        if self.processed:
            return super()._meaning(logps, sampling)
        unknown = np.full_like(logps, np.nan)
        return unknown if sampling.cut else logps, unknown.copy() if sampling.steered else logps.copy()


def _check(url: str, said: str) -> None:
    """Raise PolicyError unless a command's answer says that it succeeded."""
    try:
        answer = json.loads(said)
    except ValueError:
        answer = {}
    if not isinstance(answer, dict) or not answer.get("success"):
        raise PolicyError(f"{url} did not take the weights: {said[:MAX_BODY]}")


def _stop_reason(finish: dict[str, Any], ids: list[int], sampling: Sampling) -> StopReason:
    kind = finish.get("type")
    if kind == "abort":
        return StopReason.CANCELLED
    if kind == "length":
        return StopReason.LENGTH
    own = bool(ids) and (ids[-1] in sampling.stop_ids or not sampling.stop_strings)
    return StopReason.STOP if own else StopReason.STOP_STRING
