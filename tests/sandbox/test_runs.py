"""The sandbox in a training: a pack's limits apply to its executions, and are counted in every step."""

from pathlib import Path

import pytest

from agentrl_cli.commands import main
from tests.helpers.sandbox import open_sandbox
from tests.helpers.train import TASK_YAML, trainer_of, write_model, write_pack

CODE = """\
async def even(episode, ctx):
    session = await ctx.session()
    slow = await session.run("while True: pass")
    large = await session.bash("head -c 3000000 /dev/zero > f")
    grade = await ctx.grade("def f(): return 1", [{"call": "f", "expect": 1}])
    assert (slow.limits.wall, large.limits.file_mb, slow.limits.memory_mb) == (0.3, 2, 512), slow.limits
    return ctx.part(float(slow.limit == "wall" and large.limit == "file_mb" and grade.ok))


REWARDS = {"even": even, "length": lambda episode, ctx: 0.0}
"""


async def test_a_packs_limits_reach_its_executions_and_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await (await open_sandbox(workers=1)).close()
    model = write_model(tmp_path / "model")
    pack = write_pack(tmp_path / "pack", code=CODE)
    (pack / "task.yaml").write_text(
        TASK_YAML.replace("sandbox: false", "sandbox: {wall: 0.3, file_mb: 2}")
    )
    small, memory = {"group_size": 2, "prompts_per_step": 1}, {"workers": 1, "memory_mb": 512}
    async with trainer_of(
        pack, model, train={"steps": 2}, rollout=small, sandbox=memory
    ) as trainer:
        run = await trainer.train()
        steps = trainer.store.runs.steps(run.id)
        assert run.error == "" and [row["rewards/even/mean"] for row in steps] == [1.0, 1.0]
        for row in steps:
            found = {name: row[name] for name in row if name.startswith("sandbox/")}
            assert found == {
                "sandbox/timeout": 2.0, "sandbox/limit/wall": 2.0, "sandbox/disk_limit": 2.0,
                "sandbox/limit/file_mb": 2.0, "sandbox/ok": 4.0,
            }  # fmt: skip
    assert main(["show", run.name, "--db", str(pack / "runs" / "agentrl.db")]) == 0
    shown = capsys.readouterr().out
    assert "sandbox/limit/wall" in shown and "sandbox/ok" in shown
