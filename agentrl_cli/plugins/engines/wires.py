"""Wire formats of servers that take and return token ids: how each samples, reports and loads weights.

A report is checked before it is stored and trained on.

vLLM reports log-probabilities of the raw logits unless it was started with `--logprobs-mode processed_logprobs`, which
`remote.backend.processed_logprobs` states. Adapters need `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True,
whole weights VLLM_SERVER_DEV_MODE=1 (`/collective_rpc`, whose `reload_weights` takes a path since vLLM 0.14).

SGLang's native API (https://docs.sglang.ai/basic_usage/native_api.html) reports those at the sampling temperature, with
penalties, before top-p, top-k and min-p. Its answers name the weights that made them, so a server that returned to
others is noticed. Adapters need `--enable-lora`. Either server must be able to read the folder of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl_cli.errors import BadAnswer, PolicyError
from agentrl_cli.policies.remote.checked import (
    ABOVE_ZERO,
    choice_of,
    excerpt,
    finish,
    is_number,
    items,
    log_probabilities,
    part,
)
from agentrl_cli.types import TOP_K, Float32, Generation, Int32, Sampling, StopReason

FINISH = {
    "stop": StopReason.STOP,
    "length": StopReason.LENGTH,
    "abort": StopReason.CANCELLED,
}
"""Finish reasons of the servers."""


Pairs = list[tuple[Any, Any]]
"""Ids with their log-probabilities, unchecked."""


def check_report(
    ids: Sequence[Any],
    logps: Sequence[Any],
    tops: Sequence[Pairs],
    finish_reason: Any,
    sampling: Sampling,
    vocabulary: int | None,
    version: str = "",
) -> Generation:
    """Return the fields of a server's answer as a turn. Raises BadAnswer.

    `tops`: (id, log-probability) of the likeliest tokens at each place. `version`: the weights that made the answer;
    empty if the server does not name them.
    """
    sampled = token_ids(ids, sampling, vocabulary)
    known = log_probabilities(logps, len(sampled))
    top_ids, top_logps = alternatives(tops, len(sampled), vocabulary)
    reason = finish(finish_reason, FINISH)
    if reason is StopReason.STOP and sampling.stop_strings and sampled[-1] not in sampling.stop_ids:
        reason = StopReason.STOP_STRING
    return Generation(
        np.asarray(sampled, np.int32),
        known,
        known.copy(),
        np.full(len(sampled), np.nan, np.float32),
        top_ids,
        top_logps,
        reason,
        version,
    )


def token_ids(values: Sequence[Any], sampling: Sampling, vocabulary: int | None) -> list[int]:
    """Return sampled ids: at least one, inside the vocabulary, no more than requested."""
    limit = vocabulary or np.iinfo(np.int32).max
    for id_ in values:
        if not _is_id(id_, 0, limit):
            raise BadAnswer(
                f"sent the token id {excerpt(id_)}, which is outside the vocabulary of {limit}"
            )
    if not values:
        raise BadAnswer("sent no tokens")
    if len(values) > sampling.max_new_tokens:
        raise BadAnswer(f"sent {len(values)} tokens where {sampling.max_new_tokens} were asked for")
    return list(values)


def alternatives(
    rows: Sequence[Sequence[tuple[Any, Any]]], count: int, vocabulary: int | None
) -> tuple[Int32, Float32]:
    """Return [count, TOP_K] ids (-1 if absent) and log-probabilities (NaN) of the likeliest tokens, best first.

    There may be none, and one without a probability is left out. An id of -1 stands for a token without an id.
    """
    if rows and len(rows) != count:
        raise BadAnswer(f"sent the likeliest tokens of {len(rows)} places for {count} tokens")
    limit = vocabulary or np.iinfo(np.int32).max
    ids = np.full((count, TOP_K), -1, np.int32)
    logps = np.full((count, TOP_K), np.nan, np.float32)
    for place, row in enumerate(rows):
        for id_, logp in row:
            if not _is_id(id_, -1, limit):
                raise BadAnswer(
                    f"sent {excerpt(id_)} among the likeliest tokens, outside the vocabulary of {limit}"
                )
            if logp not in (None, -math.inf) and not (is_number(logp) and logp <= ABOVE_ZERO):
                raise BadAnswer(
                    f"sent the log-probability {excerpt(logp)} among the likeliest tokens"
                )
        known = [pair for pair in row if pair[1] not in (None, -math.inf)]
        for column, (id_, logp) in enumerate(sorted(known, key=lambda pair: -pair[1])[:TOP_K]):
            ids[place, column], logps[place, column] = id_, min(logp, 0.0)
    return ids, logps


def _is_id(value: Any, least: int, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < limit


ID = "token_id:"
TESTED_VLLM = "0.32"
"""The release of vLLM that this client is tested with; the extra `vllm` brings it."""


@dataclass(frozen=True, slots=True)
class Wire:
    """The API of one kind of server."""

    name: str
    path: str
    """Path of a request for a turn."""
    body: Callable[[str, bool, list[int], Sampling], dict[str, Any]]
    """Makes its body from the model's name, whether that is an adapter, the context and the settings."""
    read: Callable[[dict[str, Any], Sampling, int | None], Generation]
    """Reads the answer, and checks it for a vocabulary. Raises BadAnswer."""
    update: Callable[[str, str], list[tuple[str, dict[str, Any]]]]
    """Lists the commands, path and body, that load the whole weights of a folder as a version."""
    confirms: bool = False
    """Whether the answer to a command reports its success."""
    tempered: bool = False
    """Whether log-probabilities are reported at the sampling temperature."""
    start: str = ""
    """How to start such a server, for the hint of an error."""

    def known_logps(self, processed: bool, sampling: Sampling) -> tuple[bool, bool]:
        """Whether a report is the log-probability that was sampled with, and whether it is the policy's.

        `processed`: the server reports those of the distribution that it samples from.
        """
        if processed:
            return True, not sampling.truncated
        if self.tempered:
            return not sampling.cut, not sampling.steered
        raw = (
            sampling.temperature == 1.0
        )  # the raw logits are the policy's at this temperature alone
        return raw and not sampling.truncated, raw


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Return the parameters that both servers name alike. Raises PolicyError for an unsupported one.

    All of them are sent, neutral values too: a server takes a missing one from the model's own
    `generation_config.json` (Qwen2.5's has a repetition penalty of 1.1), and samples from another distribution.
    """
    if sampling.problem:
        raise PolicyError(f"{sampling.problem}.")
    if sampling.keep_support:
        raise PolicyError(
            "A server does not report the tokens that it drew from.",
            hint="Leave out rollout.truncation.replay.",
        )
    if sampling.allow is not None:
        raise PolicyError("Forced tokens need a local policy.")
    found: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_ids),
        "stop": list(sampling.stop_strings),
        "skip_special_tokens": False,
    }
    if sampling.bad_ids:
        found["logit_bias"] = {str(id_): -100.0 for id_ in sampling.bad_ids}
    return found


def _vllm_body(model: str, adapted: bool, ids: list[int], sampling: Sampling) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": ids,
        "max_tokens": sampling.max_new_tokens,
        **sampling_fields(sampling),
        "seed": sampling.seed,
        "include_stop_str_in_output": True,
        "logprobs": TOP_K,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }


def _read_vllm(answer: dict[str, Any], sampling: Sampling, vocabulary: int | None) -> Generation:
    choice = choice_of(answer)
    logprobs = part(choice, "logprobs")
    if choice.get("token_ids") is not None:
        ids = items(choice["token_ids"], "token_ids")
    else:  # servers before return_token_ids
        texts = items(logprobs.get("tokens"), "tokens")
        if not texts or not all(isinstance(text, str) and text.startswith(ID) for text in texts):
            raise BadAnswer(
                "does not send token ids, so what it samples cannot be trained",
                hint="Use a vLLM that knows return_tokens_as_token_ids, or the text-only policy for eval and chat.",
            )
        ids = [_parse_id(text) for text in texts]
    tops = list(map(_vllm_pairs, items(logprobs.get("top_logprobs"), "top_logprobs")))
    logps = items(logprobs.get("token_logprobs"), "token_logprobs")
    return check_report(ids, logps, tops, choice.get("finish_reason"), sampling, vocabulary)


def _vllm_pairs(top: Any) -> Pairs:
    """Return (id, log-probability) of alternatives named `token_id:N`; -1 for another name."""
    if not isinstance(top, dict | None):
        raise BadAnswer(f"sent {excerpt(top)} in place of the likeliest tokens")
    return [
        (_parse_id(text) if text.startswith(ID) else -1, logp) for text, logp in (top or {}).items()
    ]


def _parse_id(text: str) -> int | str:
    """Return N of `token_id:N`; for anything else the text itself, which the check of ids refuses."""
    number = text.removeprefix(ID)
    return int(number) if number.isascii() and number.isdigit() and len(number) < 12 else text


def _vllm_update(folder: str, version: str) -> list[tuple[str, dict[str, Any]]]:
    reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    return [("/collective_rpc", reload), ("/reset_prefix_cache", {})]


def _sglang_body(model: str, adapted: bool, ids: list[int], sampling: Sampling) -> dict[str, Any]:
    params = {
        **sampling_fields(sampling),
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
    return {**body, "lora_path": model} if adapted else body


def _read_sglang(answer: dict[str, Any], sampling: Sampling, vocabulary: int | None) -> Generation:
    meta = part(answer, "meta_info")
    if meta.get("output_token_logprobs") is None:
        raise BadAnswer("sends no token ids with log-probabilities, so it cannot be trained with")
    pairs = _sglang_pairs(meta["output_token_logprobs"])
    ids, logps = [id_ for id_, _ in pairs], [logp for _, logp in pairs]
    if answer.get("output_ids") not in (None, ids):
        other = excerpt(answer["output_ids"])
        raise BadAnswer(f"sent other ids ({other}) than it sent log-probabilities of")
    tops = list(map(_sglang_pairs, items(meta.get("output_top_logprobs"), "output_top_logprobs")))
    reason = part(meta, "finish_reason").get("type")
    version = str(meta.get("weight_version", ""))
    return check_report(ids, logps, tops, reason, sampling, vocabulary, version)


def _sglang_pairs(row: Any) -> Pairs:
    """Return (id, log-probability) of each entry, which SGLang sends as [log-probability, id, …]."""
    entries = items(row, "log-probabilities")
    if not all(isinstance(entry, list) and len(entry) > 1 for entry in entries):
        raise BadAnswer(f"sent log-probabilities without ids: {excerpt(row)}")
    return [(entry[1], entry[0]) for entry in entries]


def _sglang_update(folder: str, version: str) -> list[tuple[str, dict[str, Any]]]:
    # The server drops its prefix cache with the old weights.
    body = {"model_path": folder, "weight_version": version, "flush_cache": True}
    return [("/update_weights_from_disk", body)]


VLLM = Wire(
    "vllm",
    "/completions",
    _vllm_body,
    _read_vllm,
    _vllm_update,
    start=f"`pip install 'agentrl-cli[vllm]'` brings vLLM {TESTED_VLLM}; then `vllm serve MODEL` (docs/rollout.md).",
)
SGLANG = Wire(
    "sglang",
    "/generate",
    _sglang_body,
    _read_sglang,
    _sglang_update,
    confirms=True,
    tempered=True,
)
