"""The README's promises and its neighbours': the script runs and learns, the map is true."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_script_runs_and_the_agent_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 32
    for long, short in (
        ('"steps": 20', '"steps": 6'),
        ("limits = {", 'limits = {"group_size": 4, "prompts_per_step": 4, '),
    ):
        assert long in code
        code = code.replace(long, short)
    (tmp_path / "script.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("script.py", run_name="__main__")
    said = capsys.readouterr().out
    assert "library-grpo finished in" in said
    found = re.findall(r"^\d+ reward (\d\.\d\d) calls \d\.\d\d$", said, re.MULTILINE)
    rewards = [float(reward) for reward in found]
    assert len(rewards) == 6
    assert sum(rewards[-3:]) > sum(rewards[:3])
    assert (tmp_path / "runs" / "agentrl.db").is_file()


@pytest.mark.parametrize("page", ["README.md", "README.zh.md", "docs/index.md", "docs/zh/index.md"])
def test_the_clone_comes_first_until_the_package_is_published(page: str) -> None:
    """The first command of each page ended in `No matching distribution found`."""
    block = (ROOT / page).read_text(encoding="utf-8").split("```")[1].strip().splitlines()
    assert block[0].startswith("git clone ") and block[1].startswith("make demo")
    assert not any("pip install" in line for line in block)


def test_the_map_names_what_is_there() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = page.split("## Where things are")[1].split("```")[1]
    for name in re.findall(
        r"^\s*((?:[a-z_]+(?:/|\.py)?(?:[a-z.-]+/)?[ ]?)+)  ", block, re.MULTILINE
    ):
        for part in name.split():
            inside = part if part.endswith((".py", "/")) else f"{part}"
            found = [
                ROOT / inside,
                ROOT / "agentrl_cli" / inside,
                ROOT / "agentrl_cli" / f"{inside}.py",
            ]
            assert any(path.exists() for path in found), part


def test_the_translation_shows_the_same_commands() -> None:
    def commands(text: str) -> list[str]:
        return re.findall(r"^(?:agentrl|make) [^#\n]*", text, re.MULTILINE)

    chinese = (ROOT / "README.zh.md").read_text(encoding="utf-8")
    assert [c.split() for c in commands(README)] == [c.split() for c in commands(chinese)]


def test_translated_pages_show_the_commands_of_the_pages_that_run_in_tests() -> None:
    def blocks(page: Path) -> list[str]:
        return re.findall(
            r"```(?:console|yaml|python)\n.*?```", page.read_text(encoding="utf-8"), re.DOTALL
        )

    for page in ("tutorial.md", "your-own-task.md", "real-run.md"):
        assert blocks(ROOT / "docs" / "zh" / page) == blocks(ROOT / "docs" / page) != [], page
