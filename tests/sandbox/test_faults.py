"""An infrastructure fault is tried once more on a fresh box; then the episode is skipped and never scored."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl_cli.errors import SandboxFault
from agentrl_cli.sandbox import grade
from agentrl_cli.sandbox.channel import Channel
from agentrl_cli.sandbox.runner_process import Process
from agentrl_cli.tools import ToolContext, as_tool
from agentrl_cli.types import Outcome
from tests.helpers.cli import Cli
from tests.helpers.sandbox import open_sandbox
from tests.helpers.train import TASK_YAML, episodes_of, trainer_of, write_pack


class Flaky(Process):
    """A backend whose boxes go away when they are to run what says `poison`, as often as `left` says."""

    level = "ns"
    left: ClassVar[int] = 0

    async def open(self, limits: dict[str, Any]) -> Channel:
        channel = await super().open(limits)
        ask = channel.ask

        def lossy(header: dict[str, Any], body: bytes = b"") -> None:
            if b"poison" in body and Flaky.left > 0:
                Flaky.left -= 1
                channel.connection_lost(None)
            ask(header, body)

        vars(channel)["ask"] = lossy
        return channel


BACKEND: dict[str, Any] = {"backend": f"{__name__}:Flaky", "workers": 1}


async def test_one_loss_is_repaired_and_a_second_is_a_fault() -> None:
    from tests.sandbox.test_faults import Flaky  # the one that the backend's name leads to

    async with await open_sandbox(**BACKEND) as sandbox:
        context = ToolContext(session_factory=sandbox.session)
        python, bash = as_tool("run_python"), as_tool("bash")
        await python.call(context, {"code": "x = 6\nopen('f', 'w').write('7')"})
        Flaky.left = 1
        answer = await python.call(context, {"code": "x * int(open('f').read())  # poison"})
        assert (answer.text, answer.error) == ("42", None) and sandbox.counts[
            "sandbox_restarted"
        ] == 1
        Flaky.left = 2
        with pytest.raises(SandboxFault, match="failed twice"):
            await bash.call(context, {"command": "echo poison"})
        assert sandbox.counts["sandbox_restarted"] == 3 and sandbox.counts["ok"] == 2
        assert (
            await bash.call(context, {"command": "cat f"})
        ).text == "7"  # the session was rebuilt
        session = await context.session()
        Flaky.left = 2
        with pytest.raises(SandboxFault):
            await grade(session, "def f(): return 'poison'", [{"call": "f", "expect": 1}])
        await context.close()


CODE = """\
async def even(episode, ctx):
    session = await ctx.session()
    cell = await session.cell("1  # poison" if episode.sample == 0 else "1")
    slow = await session.run("while True: pass")
    large = await session.bash("head -c 3000000 /dev/zero > f")
    grade = await ctx.grade("def f(): return 1", [{"call": "f", "expect": 1}])
    assert (slow.limits.wall, large.limits.file_mb, slow.limits.memory_mb) == (0.3, 2, 512), slow.limits
    return float(cell.ok and slow.limit == "wall" and large.limit == "file_mb" and grade.ok)


REWARDS = {"even": even, "length": lambda episode, ctx: 0.0}
"""


async def test_such_an_episode_is_skipped_and_what_meets_a_packs_limits_is_counted(
    tmp_path: Path, model: Path, cli: Cli
) -> None:
    from tests.sandbox.test_faults import Flaky

    await (await open_sandbox(**BACKEND)).close()
    pack = write_pack(tmp_path / "pack", code=CODE)
    (pack / "task.yaml").write_text(
        TASK_YAML.replace("sandbox: false", "sandbox: {wall: 0.3, file_mb: 2}")
    )
    Flaky.left = 2  # both tries of the first step's sample 0; that of the second step goes well
    small, own = {"group_size": 3, "prompts_per_step": 1}, {**BACKEND, "memory_mb": 512}
    async with trainer_of(pack, model, train={"steps": 2}, rollout=small, sandbox=own) as trainer:
        run = await trainer.train()
        first, second = trainer.store.runs.steps(run.id)
        episodes = episodes_of(trainer.store, run, 1)
    assert run.error == "" and Flaky.left == 0
    lost = [episode for episode in episodes if episode.outcome is Outcome.SANDBOX_ERROR]
    assert [(e.sample, e.reward_parts, e.fact, e.advantage) for e in lost] == [
        (0, (), "skipped:fault: sandbox_error", None)
    ]
    assert "failed twice (sandbox_restarted)" in lost[0].error
    assert [e.reward for e in episodes if e not in lost] == [1.0, 1.0]
    assert first["rewards/even/mean"] == 1.0  # not 2/3: it was not scored zero
    assert (first["outcomes/sandbox_error"], first["facts/skipped:fault"]) == (1, 1)
    assert second.get("outcomes/sandbox_error", 0) == 0
    for row, played, restarts in ((first, 2, {"sandbox_restarted": 2}), (second, 3, {})):
        found = {name[8:]: row[name] for name in row if name.startswith("sandbox/")}
        met = dict.fromkeys(("timeout", "limit/wall", "disk_limit", "limit/file_mb"), played)
        assert found == {**restarts, **met, "ok": 3 * played}
    shown = cli("show", run.name, "--db", str(pack / "runs" / "agentrl.db"))
    assert "sandbox/limit/wall" in shown and "sandbox/ok" in shown
