"""The subjects of a certificate: a model in this process, a GGUF file under llama.cpp, an OpenAI-compatible address.

Each tells its tokens of a raw text, its rendering of a conversation, and log-probabilities of given tokens.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from agentrl_cli.chat.render import Chat
from agentrl_cli.errors import ModelError, PolicyError
from agentrl_cli.policies.load import Loaded
from agentrl_cli.policies.protocols import OnToken, PolicySource, generation
from agentrl_cli.policies.remote.http import ServerError
from agentrl_cli.policies.remote.text import OpenAIPolicy
from agentrl_cli.types import Float32, Generation, Int32, Message, Sampling, StopReason, ToolSchema

NOT_SERVED = ("stop_strings", "bad_ids", "allow")
"""Fields of `Sampling` that `LlamaPolicy` refuses."""


class LlamaPolicy:
    """A GGUF file through llama-cpp-python (`remote: {backend: llama_cpp, model: FILE}`), one turn after the other."""

    name = "llama_cpp"
    untrainable = "llama.cpp samples from a file, which is not trained. Use a local model"

    def __init__(self, source: PolicySource) -> None:
        """Load the file that `remote.model` names. Raises ModelError."""
        import llama_cpp

        path, self._one = Path(source.config.remote.model).expanduser(), asyncio.Lock()
        self.context_length = min(source.context_length, source.config.rollout.max_tokens)
        self.weights_version = path.name
        try:
            self.llama: Any = llama_cpp.Llama(
                str(path), n_ctx=self.context_length, logits_all=True, verbose=False
            )
        except ValueError as error:
            raise ModelError(f"llama.cpp cannot load {path}: {error}") from error

    async def generate(
        self,
        key: str,
        ids: Sequence[int] | Int32,
        sampling: Sampling,
        *,
        group: str = "",
        on_token: OnToken | None = None,
        images: Sequence[bytes] = (),
    ) -> Generation:
        """Return one turn; its log-probabilities are NaN. Raises PolicyError for images and unserved models."""
        if images:
            raise PolicyError("llama.cpp is given token ids alone here, without images.")
        if given := [name for name in NOT_SERVED if getattr(sampling, name)]:
            raise PolicyError(
                f"llama.cpp is not given {', '.join(given)} here: its turns would be others.",
                hint="Leave out rollout.stop and rollout.truncation.bad_tokens, or take the model's folder.",
            )
        async with self._one:
            out = await asyncio.to_thread(self._turn, [int(id_) for id_ in ids], sampling)
        if on_token is not None:
            for id_ in out:
                on_token(id_)
        reason = StopReason.STOP if out and out[-1] in sampling.stop_ids else StopReason.LENGTH
        version, unknown = self.weights_version, [float("nan")] * len(out)
        return generation(out, reason, weights_version=version, logps=unknown)

    def _turn(self, ids: list[int], sampling: Sampling) -> list[int]:
        self.llama.set_seed(sampling.seed % 2**31)
        out: list[int] = []
        for id_ in self.llama.generate(
            ids,
            temp=sampling.temperature,
            top_k=sampling.top_k if sampling.temperature else 1,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repeat_penalty=sampling.repetition_penalty,
        ):
            out.append(int(id_))
            full = len(out) >= min(sampling.max_new_tokens, self.context_length - len(ids))
            if full or id_ in sampling.stop_ids:
                break
        return out

    async def release(self, key: str) -> None:
        """Do nothing: no episode has a cache of its own."""

    async def close(self) -> None:
        self.llama.close()


class Here:
    """A model in this process, with its own tokenizer and template."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded, self.chat = loaded, loaded.chat
        self.backend = tokenizers.Tokenizer.from_str(loaded.chat.tokenizer.json)

    async def encode(self, text: str) -> list[int] | int | None:
        """Return the ids of a raw text with those that a program puts before them; their number; None: not known."""
        return list(self.backend.encode(text).ids)

    async def prompt(self, messages: list[Message], tools: list[ToolSchema]) -> str | int | None:
        """Return a conversation and a generation prompt as text; its number of tokens; None: not known."""
        ids = self.chat.rendered_ids(messages, tools or None, add_generation_prompt=True)
        return self.chat.decode(ids)

    async def score(self, ids: Sequence[int], places: Sequence[int]) -> Float32:
        """Return the log-probabilities of the tokens at some places; NaN: not known."""
        return log_probabilities(self.loaded.model, ids, places)


class Gguf(Here):
    """A GGUF file under llama.cpp, with the template in the file."""

    def __init__(self, loaded: Loaded, llama: Any) -> None:
        super().__init__(loaded)
        self.llama, own = llama, copy.copy(loaded.chat.tokenizer)
        own.chat_template, own.tool_template = llama.metadata.get("tokenizer.chat_template"), None
        self.chat = Chat(own, "auto", append_only=True)

    async def encode(self, text: str) -> list[int] | int | None:
        return list(self.llama.tokenize(text.encode(), add_bos=True, special=True))

    async def score(self, ids: Sequence[int], places: Sequence[int]) -> Float32:
        self.llama.reset()
        self.llama.eval(list(ids))
        return _pick_logprobs(self.llama.scores[np.array(places) - 1], ids, places)


class Address(Here):
    """A model behind an OpenAI-compatible address: its numbers of tokens, and the likeliest next ones."""

    def __init__(self, loaded: Loaded, policy: OpenAIPolicy) -> None:
        super().__init__(loaded)
        self.policy = policy

    async def encode(self, text: str) -> list[int] | int | None:
        return _count(await self._ask("/completions", prompt=text))

    async def prompt(self, messages: list[Message], tools: list[ToolSchema]) -> str | int | None:
        if any(message.get("tool_calls") for message in messages):
            return None  # a server may write their arguments in another order
        more = {"tools": tools} if tools else {}
        return _count(await self._ask("/chat/completions", messages=messages, **more))

    async def score(self, ids: Sequence[int], places: Sequence[int]) -> Float32:
        found = []
        for place in places:
            # ids go to the servers that take them (vLLM, llama-server), a text to others; some list 5 at most
            prompts = (list(ids[:place]), self.chat.decode(ids[:place]))
            for prompt, most in product(prompts, (20, 5)):
                asked = {"prompt": prompt, "logprobs": most, "cache_prompt": True}
                answer = await self._ask("/completions", return_tokens_as_token_ids=True, **asked)
                if top := _likeliest(answer):
                    break
            spelled = self.chat.tokenizer.token_bytes(ids[place])
            found.append(top.get(ids[place], top.get(spelled, np.nan)))
        return np.array(found, np.float32)

    async def _ask(self, path: str, **body: Any) -> dict[str, Any]:
        """Return the answer; empty where the address has no such path. Raises PolicyError if it cannot be reached."""
        asked = {"model": self.policy.model, "max_tokens": 1, "temperature": 0, **body}
        try:
            return dict(await self.policy.endpoint.post(path, asked))
        except ServerError:
            return {}


def _count(answer: dict[str, Any]) -> int | None:
    count: int | None = (answer.get("usage") or {}).get("prompt_tokens")
    return count


def _likeliest(answer: dict[str, Any]) -> dict[int | bytes, float]:
    """Return id, or bytes if the server sends no ids, to log-probability of the likeliest first tokens."""
    try:
        listed = answer["choices"][0]["logprobs"]
        if (
            "content" not in listed
        ):  # of OpenAI's completions; the others are of its chat completions
            named = listed["top_logprobs"][0].items()
            return {_key({"token": name}): logp for name, logp in named}
        return {_key(one): one["logprob"] for one in listed["content"][0]["top_logprobs"]}
    except (LookupError, TypeError, ValueError, AttributeError):
        return {}


def _key(one: dict[str, Any]) -> int | bytes:
    if one.get("id") is not None:
        return int(one["id"])
    if one.get("bytes"):
        return bytes(one["bytes"])
    text = str(one["token"])
    named = text.startswith("token_id:")  # vLLM's
    return int(text[len("token_id:") :]) if named else text.encode(errors="replace")


def _pick_logprobs(logits: Any, ids: Sequence[int], places: Sequence[int]) -> Float32:
    import torch

    given = torch.as_tensor(logits).float().log_softmax(-1).cpu()
    wanted = torch.tensor([[ids[place]] for place in places])
    found: Float32 = given.gather(1, wanted)[:, 0].numpy()
    return found


def log_probabilities(model: Any, ids: Sequence[int], places: Sequence[int]) -> Float32:
    """Return the log-probabilities of the tokens at some places under a causal LM, each given all before it."""
    import torch

    given = torch.tensor([ids], device=next(model.parameters()).device)
    with torch.no_grad():
        logits = model(input_ids=given, use_cache=False).logits[0]
    return _pick_logprobs(logits[[place - 1 for place in places]], ids, places)


def subject_of(loaded: Loaded) -> Here:
    """Return a loaded target as the subject of its kind."""
    if isinstance(loaded.policy, LlamaPolicy):
        return Gguf(loaded, loaded.policy.llama)
    policy = loaded.policy
    return Address(loaded, policy) if isinstance(policy, OpenAIPolicy) else Here(loaded)
