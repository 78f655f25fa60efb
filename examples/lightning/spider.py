"""After Agent-Lightning's spider, without its graph and data: a LitAgent over a database of its own.

OPENAI_API_BASE=http://127.0.0.1:8000/v1 python examples/lightning/spider.py      a few tasks, nothing is learnt
"""

import os
import re
import sqlite3
from typing import Any

import httpx2

import agentrl_cli.plugins.lightning as agl

SCHEMA = "CREATE TABLE singer (name TEXT, age INTEGER); INSERT INTO singer VALUES ('Ann', 30), ('Bo', 41);"


def rows(query: str) -> Any:
    with sqlite3.connect(":memory:") as db:
        db.executescript(SCHEMA)
        return db.execute(query).fetchall()


class LitSQLAgent(agl.LitAgent[dict[str, Any]]):
    def __init__(self, max_turns: int = 2) -> None:
        super().__init__()
        self.max_turns = max_turns

    def rollout(
        self, task: dict[str, Any], resources: agl.NamedResources, rollout: agl.Rollout
    ) -> float | None:
        llm = resources["main_llm"]
        url = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        messages = [
            {"role": "user", "content": f"{SCHEMA}\nWrite one SQL query: {task['question']}"}
        ]
        with httpx2.Client(trust_env=False, timeout=60) as client:
            for _ in range(self.max_turns):
                body = {"model": llm.model, "messages": messages, **llm.sampling_parameters}
                answer = client.post(f"{url}/chat/completions", json=body)
                if answer.status_code == 400:  # the context is full
                    return None
                text = answer.raise_for_status().json()["choices"][0]["message"]["content"] or ""
                found = re.search(r"SELECT[^;`]*", text)
                try:
                    return float(rows(found[0] if found else text) == rows(task["query"]))
                except sqlite3.Error as error:
                    messages += [
                        {"role": "assistant", "content": text},
                        {"role": "user", "content": f"Error: {error}"},
                    ]
        return 0.0


def main(endpoint: str, **options: Any) -> agl.Trainer:
    llm = agl.LLM(
        endpoint=endpoint, model="", sampling_parameters={"temperature": 0.7, "max_tokens": 64}
    )
    trainer = agl.Trainer(n_workers=1, initial_resources={"main_llm": llm}, **options)
    tasks = [
        {"question": "How old is Ann?", "query": "SELECT age FROM singer WHERE name = 'Ann'"}
    ] * 2
    trainer.dev(LitSQLAgent(), tasks)
    return trainer


if __name__ == "__main__":
    agl.setup_logging("INFO")
    main(os.environ["OPENAI_API_BASE"])
