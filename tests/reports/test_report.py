"""Reports and HTML exports: what is in them, and that no text of an episode becomes markup or runs."""

import re
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import pytest

from agentrl_cli.commands import main
from agentrl_cli.config.train import Stop
from agentrl_cli.reports.html import push_step
from agentrl_cli.reports.legend import LEGEND, RULES_TITLE, find_words
from agentrl_cli.reports.report import make_report, oddest
from agentrl_cli.rollout.flags import RULES
from agentrl_cli.store import Store
from agentrl_cli.tui.common.layers import LAYERS, layer_key
from agentrl_cli.tui.common.reader import token_texts
from agentrl_cli.types import Fact, Origin, Outcome, RewardPart, ToolResult
from tests.helpers import tui_demo as demo
from tests.helpers.cli import Cli
from tests.helpers.web import browser

HOSTILE = (
    "</script></pre></style><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<svg onload=document.title='owned'>\x1b[31m]]><!-- ``` | [x](javascript:alert(1)) &lt;b&gt;"
)
SECRET = "sk-" + "a1B2" * 8


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The invented run with evaluated tasks of which one flips, and an episode whose tool and reward are hostile."""
    path = tmp_path_factory.mktemp("report") / "agentrl.db"
    demo.fill(path, steps=20)
    words = demo.Words()
    with Store.open(path) as store:
        for step, solved in ((0, False), (20, True)):
            for sample in (1, 2):
                one = demo.episode(words, sample, solved=solved, step=step)
                one = replace(one, id=f"eval{step}{sample}", kind="eval", group_id=None, fact="")
                store.episodes.finish(one)
        w = demo.Writer(words, 9)
        w.given("user", "go", Origin.USER)
        w.assistant("so be it", [demo.call("<b>calculator</b>", {"expr": HOSTILE})])
        w.given(
            "tool", HOSTILE, Origin.TOOL, [ToolResult(HOSTILE, error="<i>bad</i>", seconds=0.1)]
        )
        bad = demo.episode(words, 9, solved=False, step=20)
        parts = (RewardPart("<u>correct</u>", -9.0, 1.0, primary=True, detail=HOSTILE),)
        bad = replace(
            bad,
            id="hostile1",
            task_id="<s>task|</s>",
            turns=tuple(w.turns),
            tokens=w.tokens(),
            flags=("LOOP",),
        )
        bad = replace(
            bad, reward_parts=parts, outcome=Outcome.FAILED, advantage=-3.0, flags=("LOOP",)
        )
        store.episodes.finish(bad)
        store.signals.add(bad.id, demo.signals_of(bad))
        store.tokenizers.add("words", words.json(), "", {})
        store.journal.add_alert("run7", "warn", "x", 1.0, 0.5, HOSTILE)
        store.journal.add_event("run7", "machine", {"processor": "<em>CPU</em>", "python": "3.11"})
        store.runs.update("run7", status="finished", config={"note": HOSTILE, "key": SECRET})
    return path


@pytest.fixture(scope="module")
def pages(db: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("pages")
    files = {"report": out / "report.html", "export": out / "export.html", "md": out / "r.md"}
    for command in (
        ["report", "grpo-07", "--out", str(files["report"])],
        ["report", "grpo-07", "--format", "md", "--out", str(files["md"])],
        ["export", "hostile1", "ep0020001", "--html", "--out", str(files["export"])],
    ):
        assert main([*command, "--db", str(db)]) == 0
    return files


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}


def test_a_report_has_all_its_parts(db: Path, pages: dict[str, Path]) -> None:
    with Store.open(db, readonly=True) as store:
        found = make_report(store, "grpo-07", token_texts)
    assert [(line.flip, line.task_id, line.before, line.after) for line in found.flipped] == [
        ("gained", "calc/0417", (0, 2), (2, 2))
    ]
    assert [sample.why for sample in found.samples] == ["best", "worst", "oddest"]
    assert found.samples[1].row.id == "hostile1" and found.samples[0].row.outcome == "solved"
    assert {"eval-test", "reward", "entropy", "kl", "reward-parts"} <= {
        name for name, _ in found.pictures
    }
    assert "0.100 became 0.212" in found.verdict and "the intervals do not overlap" in found.verdict
    assert ("processor", "<em>CPU</em>") in found.machine
    text, md = pages["report"].read_text(), pages["md"].read_text()
    for page in (text, md):
        assert (
            "0.162 to 0.262" in page
            and "gained" in page
            and "calc/0417" in page
            and SECRET not in page
        )
    assert 'class="u' in text and 'class="d' in text  # pushed up and down
    for name, _ in found.pictures:
        assert f"![{name}](r/{name}.svg)" in md
        assert ET.parse(pages["md"].parent / "r" / f"{name}.svg").getroot().tag.endswith("svg")


def test_no_text_of_an_episode_becomes_markup(pages: dict[str, Path]) -> None:
    found = Tags(pages["report"].read_text())
    assert not {"script", "img", "i", "b", "u", "s", "em", "iframe", "a"} & set(found.tags)
    assert found.tags.count("style") == 1 and not any(
        name.startswith("on") for name in found.attributes
    )
    assert (
        "default-src 'none'" in pages["report"].read_text()
        and "\x1b" not in pages["report"].read_text()
    )
    found = Tags(pages["export"].read_text())
    assert found.tags.count("script") == 2 and not {"img", "svg", "i", "u", "s"} & set(found.tags)
    assert "script-src 'sha256-" in pages["export"].read_text()
    md = pages["md"].read_text()
    outside = [
        part for n, part in enumerate(md.split("````")) if n % 2 == 0
    ]  # the hostile text needs a fence of four
    assert "<script>" not in "".join(outside) and "\\[x\\](javascript" in md


def test_hostile_output_does_not_run_in_a_browser(pages: dict[str, Path], tmp_path: Path) -> None:
    for name in ("report", "export"):
        done = subprocess.run(
            [*browser(tmp_path / name), "--dump-dom", "--virtual-time-budget=2000", pages[name].as_uri()],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        found = Tags(done.stdout)  # the page as its own script drew it
        assert "<title>agentrl" in done.stdout and "owned</title>" not in done.stdout
        assert "img" not in found.tags and not {"onerror", "onload"} & found.attributes
        assert "document.title='owned'" in done.stdout  # as text
        if name == "export":
            assert (
                'class="turn tool"' in done.stdout and "REWARD" in done.stdout
            )  # its own script did run


@pytest.mark.parametrize(
    ("asked", "folder"), [("made", "made-pictures"), ("r.md", "r"), ("", "report-grpo-07")]
)
def test_pictures_lie_beside_markdown_of_any_name(
    db: Path, tmp_path: Path, cli: Cli, asked: str, folder: str
) -> None:
    """A name without suffix was taken for the folder of the pictures, too. An existing file is kept."""
    out = tmp_path / asked
    cli("report", "grpo-07", "--format", "md", "-o", str(out), "--db", str(db))
    md = (out if asked else tmp_path / "report-grpo-07.md").read_text()
    shown = re.findall(r"!\[[^]]*\]\(([^)]*)\)", md)
    assert len(shown) > 2 and all((tmp_path / path).is_file() for path in shown)
    assert {Path(path).parent.name for path in shown} == {folder}
    path = tmp_path / "report.html"
    path.write_text("mine")
    cli("report", "grpo-07", "--out", str(path), "--db", str(db), code=2, said="--force")
    assert path.read_text() == "mine"


def test_the_oddest_has_the_rarest_flags_and_a_push_has_seven_steps(db: Path) -> None:
    with Store.open(db, readonly=True) as store:
        rows = store.episodes.rows(store.episodes.ids("kind:train -outcome:none", "time", "run7"))
    odd = oddest(rows)
    assert odd is not None and odd.id == "hostile1" and oddest([]) is None
    assert [push_step(p) for p in (5.0, 1.0, 0.99, 1 / 64, 1 / 129, -1.0, -0.3, 0.0, float("nan"))] == [
        7, 7, 6, 1, 0, -7, -5, 0, 0,
    ]  # fmt: skip


# --- the words of the screens ---


def test_every_flag_outcome_fact_and_layer_is_explained() -> None:
    words = {title.partition(":")[0]: section for title, section in LEGEND.items()}
    assert set(words["Flags"]) == {*RULES, "DRIFT"}
    assert set(", ".join(words["Outcomes"]).split(", ")) == {str(one) for one in Outcome}
    assert set(words["Facts"]) == {fact.kind for fact in Fact}
    keys = [name.partition(" ")[0] for name in words["Layers"]]
    assert keys == [layer_key(number) for number in range(len(LAYERS))]


def test_a_word_is_found_whole_before_in_part_and_rules_are_words() -> None:
    assert find_words("notool") == {
        "Flags: anomalies of an episode, by rules": {"NOTOOL": "no tool was called"}
    }
    assert list(find_words("push")["On the screens"]) == ["push"]
    assert "train.lr" in find_words("collapse")[RULES_TITLE]["collapse"]
    for rule in get_args(Stop):
        assert rule in find_words(rule)[RULES_TITLE]


def test_the_command(cli: Cli) -> None:
    assert list(cli.json("show", "--words", "adv")["On the screens"]) == ["adv"]
    cli("words", "LOPP", code=2, said="loop")
    cli("show", "adv", "--words", "--time", code=2, said="--words explains a word")
