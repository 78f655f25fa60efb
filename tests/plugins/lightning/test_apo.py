"""APO: a script of Agent-Lightning's tunes its prompt with an OpenAI client, on the search of `agentrl optimize`."""

from types import SimpleNamespace
from typing import Any

import pytest

import agentrl_cli.plugins.lightning as agl

WORDS = ("alpha", "beta", "gamma")
TASKS = [{"word": word} for word in WORDS]


class Reviewer:
    """An AsyncOpenAI client whose models are a function: each edit adds a word, and the first loses the placeholder."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float, str]] = []
        self.chat = SimpleNamespace(completions=self)

    async def create(
        self, *, model: str, messages: list[dict[str, str]], temperature: float
    ) -> Any:
        prompt = messages[0]["content"]
        self.asked.append((model, temperature, prompt))
        text = "- name one more word"
        if model == "editor":
            old = prompt.split("```")[1].strip()
            first = sum(name == "editor" for name, *_ in self.asked) == 1
            text = (
                "no braces"
                if first
                else f"{old} {next((word for word in WORDS if word not in old), '!')}"
            )
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=text))])


@agl.rollout
def agent(task: dict[str, str], prompt_template: agl.PromptTemplate) -> float:
    """Solves a task whose word stands in its prompt; one of them breaks until "gamma" does."""
    prompt = prompt_template.format(task=task["word"].upper())
    if task["word"] == "gamma" and "gamma" not in prompt:
        raise LookupError("no gamma")
    return float(task["word"] in prompt)


def apo(client: Any, **more: Any) -> agl.APO[Any]:
    size: dict[str, Any] = {
        "gradient_batch_size": 2,
        "val_batch_size": 2,
        "beam_width": 2,
        "branch_factor": 2,
        "beam_rounds": 4,
    }
    return agl.APO(
        client,
        gradient_model="critic",
        apply_edit_model="editor",
        diversity_temperature=0.7,
        **size,
        **more,
    )


def test_the_best_prompt_of_a_search_over_the_queue() -> None:
    client, store = Reviewer(), agl.InMemoryLightningStore()
    algorithm = apo(client)
    with pytest.raises(ValueError, match="No best prompt"):
        algorithm.get_best_prompt()
    seed = agl.PromptTemplate(template="Answer {task}.", engine="f-string")
    resources: agl.NamedResources = {"text": seed}
    trainer = agl.Trainer(
        algorithm=algorithm, store=store, n_runners=4, initial_resources=resources
    )
    with pytest.raises(ValueError, match="val_dataset"):
        trainer.fit(agent, TASKS)
    trainer.fit(agent, TASKS, val_dataset=TASKS)
    best = algorithm.get_best_prompt()
    assert (
        all(word in best.template for word in WORDS)
        and "{task}" in best.template
        and best.engine == "f-string"
    )
    assert {model: temperature for model, temperature, _ in client.asked} == {
        "critic": 0.7,
        "editor": 0.7,
    }
    critiques = "".join(prompt for model, _, prompt in client.asked if model == "critic")
    assert (
        '{"word": "alpha"}' in critiques
        and "final reward 0" in critiques
        and "agent_error" in critiques
    )


def test_a_search_needs_a_template() -> None:
    given: list[agl.NamedResources | None] = [
        None,
        {"main_llm": agl.LLM(endpoint="http://127.0.0.1/v1", model="m")},
    ]
    for resources in given:
        trainer = agl.Trainer(algorithm=apo(Reviewer()), initial_resources=resources, n_runners=2)
        with pytest.raises(ValueError, match="initial_resources"):
            trainer.fit(agent, TASKS, val_dataset=TASKS)
