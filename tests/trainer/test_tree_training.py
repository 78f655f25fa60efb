"""A training step over episodes that branch, from the store and back into it."""

from pathlib import Path
from typing import Any

import numpy as np

from agentrl_cli.types import Episode
from tests.helpers.train import episodes_of, trainer_of
from tests.helpers.trees import grafted


async def test_a_step_trains_branched_episodes_and_stores_every_tokens_numbers(
    tmp_path: Path,
    model: Path,
) -> None:
    sections: dict[str, Any] = {
        "train": {"steps": 1},
        "algo": {"advantage": "dr_grpo", "aggregation": "episode_mean"},
    }
    async with trainer_of(tmp_path / "first", model, **sections) as trainer:
        await trainer.train()
        made = episodes_of(trainer.store, trainer.run)
    async with trainer_of(tmp_path / "second", model, **sections) as trainer:
        groups: dict[str | None, list[Episode]] = {}
        for one in made:
            groups.setdefault(one.group_id, []).append(one)
        trees = {}
        for group in groups.values():
            for one, other in zip(group, [*group[1:], group[0]], strict=True):
                at = next(turn.index for turn in one.turns if turn.role == "assistant")
                tree = grafted(
                    one, other, at
                )  # the answer of a sibling to the same prompt, as a second branch
                trees[one.id] = tree.with_(run_id=trainer.run.id, fact="", advantage=None)
        trainer.store.episodes.add(trees.values(), tokenizer=trainer.loaded.hash)
        await trainer.train()
        back = episodes_of(trainer.store, trainer.run)
        assert {e.id for e in back} == set(trees)  # none was sampled again
        assert trainer.store.runs.steps(trainer.run.id)[-1]["branches/mean"] == 2.0
        trained = [e for e in back if e.fact == "trained"]
        assert trained
        count = len(trained)
        for e in trained:
            assert len(e.branches) == 2 and e.turns == trees[e.id].turns
            signals, mask = trainer.store.signals.get(e.id), e.tokens.trained_mask
            assert signals is not None and np.isnan(signals.weight[~mask]).all()
            weight = (e.advantage or 0.0) / (e.trained_tokens * count)
            assert np.allclose(signals.weight[mask], weight, rtol=1e-4)
            # each branch under the weights that sampled it: the log-probabilities of then, token by token
            assert np.allclose(signals.logp_train[mask], e.tokens.logp_policy[mask], atol=1e-4)
