"""Reports and exports: what is in them, that no text of an episode becomes markup or runs, and no secret leaves; where
the time goes; read-only SQL, and searching text.
"""

import json
import re
import shutil
import sqlite3
import subprocess
import xml.etree.ElementTree as ET
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.cells import cell_len

from agentrl_cli.commands import main
from agentrl_cli.config.train import Stop
from agentrl_cli.errors import NotFound
from agentrl_cli.registry.plugins import spread_settings
from agentrl_cli.reports.html import page_object, push_step
from agentrl_cli.reports.legend import LEGEND, RULES_TITLE, find_words
from agentrl_cli.reports.report import make_report
from agentrl_cli.reports.report_pages import write_report
from agentrl_cli.reports.run_data import sort_by_rarity
from agentrl_cli.reports.spans import (
    GLYPHS,
    episode_spans,
    of_episode,
    of_step,
    waterfall_lines,
)
from agentrl_cli.rollout.flags import RULES
from agentrl_cli.store import EvalRow, RunRow, Store
from agentrl_cli.tui.common.layers import LAYERS, layer_key
from agentrl_cli.tui.common.reader import token_texts
from agentrl_cli.types import (
    Episode,
    Fact,
    Origin,
    Outcome,
    RewardPart,
    ToolCall,
    ToolResult,
    Turn,
)
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
        for _ in range(1000):
            store.journal.add_event("run7", "agent_stderr", {"episode": "e", "text": "x"})
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


def test_a_report_has_all_its_parts(db: Path, pages: dict[str, Path], tmp_path: Path) -> None:
    with closing(Store.open(shutil.copy(db, tmp_path))) as store:
        found = make_report(store, "grpo-07", token_texts)
        for step, split, rate in ((20, "held", 0.3), (0, "held", 0.1), (20, "new", 0.9)):
            store.runs.add_eval(EvalRow("run7", step, split=split, pass_rate=rate, at=9e9))
        later = make_report(store, "grpo-07", token_texts).verdict
    assert "On the held split 0.100 became 0.300" in later  # the newest split that has two
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


def test_a_secret_in_a_thought_a_message_or_an_error_is_in_no_page(tmp_path: Path) -> None:
    """The content of a turn has neither its thoughts nor its calls, which the tokens spell."""
    words = demo.Words()
    with Store.open(tmp_path / "a.db") as store:
        store.runs.add(RunRow("r", "run", status="failed", error=f"401 for {SECRET}"))
        for id, asked, thought in (("thinks", "go", SECRET), ("asks", f"go {SECRET}", "yes")):
            w = demo.Writer(words, 1)
            w.given("user", "go", Origin.USER)
            w.assistant(f"<think>{thought}</think>done")
            said = [{"role": "user", "content": asked}, {"role": "assistant", "content": "done"}]
            turns = tuple(replace(t, messages=(m,)) for t, m in zip(w.turns, said, strict=True))
            one = demo.episode(words, 1, solved=True, run_id="r")
            one = replace(one, id=id, turns=turns, tokens=w.tokens())
            store.episodes.finish(one, tokenizer="words")
        store.tokenizers.add("words", words.json(), "", {})
        report = make_report(store, "run", token_texts)
        pages = {id: page_object(store, id, token_texts) for id in ("thinks", "asks")}
    write_report(report, tmp_path / "r.html", markdown=False)
    text = (tmp_path / "r.html").read_text()
    assert "401 for [masked:api-key]" in text and "was masked" in text and SECRET not in text
    assert all(page["masked"] and page["tokens"] is None for page in pages.values())
    assert SECRET not in json.dumps(pages)
    assert "go [masked:api-key]" in pages["asks"]["turns"][0]["messages"][0]


def test_pictures_lie_beside_markdown_of_any_name(db: Path, tmp_path: Path, cli: Cli) -> None:
    """A name without suffix was taken for the folder of the pictures, too. An existing file is kept."""
    cli.always = ("--db", str(db))
    for given, name, folder in (
        (["-o", "made"], "made", "made-pictures"),
        ([], "report-grpo-07.md", "report-grpo-07"),
    ):
        cli("report", "grpo-07", "--format", "md", *given)
        shown = re.findall(r"!\[[^]]*\]\(([^)]*)\)", (tmp_path / name).read_text())
        assert len(shown) > 2 and all((tmp_path / path).is_file() for path in shown)
        assert {Path(path).parent.name for path in shown} == {folder}
    path = tmp_path / "report.html"
    path.write_text("mine")
    cli("report", "grpo-07", "--out", str(path), code=2, said="--force")
    assert path.read_text() == "mine"


def test_the_oddest_has_the_rarest_flags_and_a_push_has_seven_steps(db: Path) -> None:
    with Store.open(db, readonly=True) as store:
        rows = store.episodes.rows(store.episodes.ids("kind:train -outcome:none", "time", "run7"))
    assert sort_by_rarity(rows)[0].id == "hostile1" and sort_by_rarity([]) == []
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
    cli("show", "adv", "--words", "--time", code=2, said="--time does nothing with --words")


# --- where the time goes: spans by hand-computed numbers ---

# Begins 0.5 s late, waits 0.5 s, samples 3 s, waits 0.5 s, two calls of 1.5 s together, samples 2
# s, is graded 2 s.
TEN = (
    Turn(0, "user", (), 0, 0, started=100.5),
    Turn(
        1,
        "assistant",
        (),
        0,
        0,
        (ToolCall("1", "a", {}, ""), ToolCall("1", "a", {}, "")),
        started=101.0,
        seconds=3.0,
    ),
    Turn(
        2,
        "tool",
        (),
        0,
        0,
        results=(ToolResult("x", seconds=1.0), ToolResult("y", seconds=0.5)),
        started=106.0,
    ),
    Turn(3, "assistant", (), 0, 0, started=106.0, seconds=2.0),
)


SEARCH = ToolCall("1", "search", {}, "")


def made(id: str = "e", turns: tuple[Turn, ...] = TEN, at: float = 0.0, **more: object) -> Episode:
    moved = tuple(Turn(t.index, t.role, (), 0, 0, t.calls, t.results, started=t.started + at, seconds=t.seconds,
                       parent=t.parent) for t in turns)  # fmt: skip
    return Episode(id, "p/task-1", turns=moved, started=100.0 + at, ended=110.0 + at, outcome=Outcome.FAILED,
                   reward_parts=(RewardPart("r", 0.0, 1.0, True),), **more)  # type: ignore[arg-type]  # fmt: skip


Span = tuple[str, float, float, str, int]
QUICK = Turn(2, "tool", (), 0, 0, results=(ToolResult("x", seconds=1.5),), started=104.0)
# What is measured: the turns, the episode's kind, and its spans: kind, start, seconds, label, branch.
SPANS: dict[str, tuple[tuple[Turn, ...], str, list[Span]]] = {
    "an episode": (
        TEN,
        "train",
        [
            ("waiting", 0.0, 0.5, "begin", 0),
            ("waiting", 0.5, 0.5, "1 assistant 0 tok", 0),
            ("sampling", 1.0, 3.0, "1 assistant 0 tok", 0),
            ("waiting", 4.0, 0.5, "2 tool", 0),
            ("tool", 4.5, 1.5, "2 2×a", 0),
            ("sampling", 6.0, 2.0, "3 assistant 0 tok", 0),
            ("grading", 8.0, 2.0, "grading", 0),
        ],
    ),
    "others' spans begin when a tool did": (
        (*TEN[:2], QUICK, *TEN[3:]),
        "import",
        [
            ("waiting", 0.0, 0.5, "begin", 0),
            ("waiting", 0.5, 0.5, "1 assistant 0 tok", 0),
            ("sampling", 1.0, 3.0, "1 assistant 0 tok", 0),
            ("tool", 4.0, 1.5, "2 2×a", 0),
            ("waiting", 5.5, 0.5, "3 assistant 0 tok", 0),
            ("sampling", 6.0, 2.0, "3 assistant 0 tok", 0),
            ("grading", 8.0, 2.0, "grading", 0),
        ],
    ),
    "a file without durations has only the times between messages": (
        tuple(replace(turn, seconds=0.0, results=()) for turn in TEN),
        "import",
        [
            ("between messages", 0.0, 0.5, "0 user", 0),
            ("between messages", 0.5, 0.5, "1 assistant", 0),
            ("between messages", 1.0, 5.0, "2 tool", 0),
            ("grading", 6.0, 4.0, "grading", 0),
        ],
    ),
    "an agent's program runs between its requests, and branches are apart": (
        (
            Turn(0, "user", (), 0, 0, started=105.0),  # recorded with its answer
            Turn(1, "assistant", (), 0, 0, (SEARCH,), started=101.0, seconds=4.0),
            Turn(2, "tool", (), 0, 0, started=109.0),
            Turn(3, "assistant", (), 0, 0, started=107.0, seconds=2.0),
            Turn(4, "user", (), 0, 0, started=103.0, parent=-1),
            Turn(5, "assistant", (), 0, 0, started=102.0, seconds=1.0, parent=4),
        ),
        "train",
        [
            ("waiting", 0.0, 1.0, "begin", 0),
            ("sampling", 1.0, 4.0, "1 assistant 0 tok", 0),
            ("agent", 5.0, 2.0, "2 search", 0),
            ("sampling", 7.0, 2.0, "3 assistant 0 tok", 0),
            ("waiting", 0.0, 2.0, "begin", 1),
            ("sampling", 2.0, 1.0, "5 assistant 0 tok", 1),
            ("grading", 9.0, 1.0, "grading", 0),
        ],
    ),
}


@pytest.mark.parametrize(("turns", "kind", "spans"), SPANS.values(), ids=SPANS)
def test_spans(turns: tuple[Turn, ...], kind: str, spans: list[Span]) -> None:
    found = episode_spans(made(turns=turns, kind=kind))
    assert [
        (s.kind, round(s.start, 3), round(s.seconds, 3), s.label, s.branch) for s in found
    ] == spans


SPREADS = pytest.mark.skipif(
    not spread_settings(), reason="needs two cores, and the plugin that has workers"
)


def fill(
    path: Path, rollout: float, update: float, config: dict[str, object], **more: float
) -> None:
    with Store.open(path) as store:
        store.runs.add(
            RunRow(
                "r", "run", kind="train", status="finished", step=1, total_steps=1, config=config
            )
        )
        for n in range(4):
            one = made(
                f"e{n}", at=0.5 * n, run_id="r", step=1, kind="train", sample=n, fact="trained"
            )
            store.episodes.finish(one)
        took = {
            "time/step": rollout + update,
            "time/rollout": rollout,
            "time/update": update,
        } | more
        store.runs.add_step("r", 1, took)
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute("UPDATE steps SET at=?", (100.0 + rollout + update,))


IDLE = {"time/cpu": 14.0}
AHEAD = "rollout.async_staleness=1"
HERE: dict[str, Any] = {"cluster": {"kind": "here", "workers": 1}}


@pytest.mark.parametrize(
    ("rollout", "update", "config", "more", "advice", "setting"),
    [
        (12.0, 1.0, {}, {}, "Sampling takes 50%", "rollout.max_new_tokens=128"),
        (12.0, 4.0, {}, {}, "nothing is sampled meanwhile", AHEAD),
        (
            12.0,
            4.0,
            {"rollout": {"async_staleness": 1}},
            {},
            "Sampling takes 50%",
            "rollout.max_new_tokens=128",
        ),
        (12.0, 20.0, {}, {}, "The update takes 62%", "train.token_budget=8192"),
        (12.0, 20.0, {"algo": {"epochs": 2}}, {}, "in 2 passes", "algo.epochs=1"),
        (40.0, 4.0, {}, {}, "The last", AHEAD),
        (40.0, 4.0, {"rollout": {"async_staleness": 1}}, {}, "Sampling takes", "max_new_tokens"),
        # a core that is left idle takes workers
        pytest.param(12.0, 4.0, HERE, IDLE, "", "cluster.workers=2", marks=SPREADS),
        pytest.param(12.0, 4.0, {}, IDLE, "", "cluster.kind=processes", marks=SPREADS),
        (12.0, 4.0, {}, {"time/cpu": 25.0}, "", AHEAD),
        (12.0, 4.0, {}, {**IDLE, "gpu/memory": 1.0}, "", AHEAD),
        (12.0, 4.0, {"cluster": {"kind": "ray", "workers": 4}}, {"time/cpu": 3.0}, "", AHEAD),
    ],
)
def test_a_step_names_the_setting_that_shortens_it(
    tmp_path: Path,
    rollout: float,
    update: float,
    config: dict[str, object],
    more: dict[str, float],
    advice: str,
    setting: str,
) -> None:
    fill(tmp_path / "a.db", rollout, update, config, **more)
    with Store.open(tmp_path / "a.db", readonly=True) as store:
        run = store.runs.get("run")
        found = of_step(store, run)
        with pytest.raises(NotFound, match="no finished step 1") as caught:
            of_step(store, replace(run, id="other", step=0))
    assert caught.value.hint == "It has none yet."
    assert found.totals == {"sampling": 20.0, "grading": 8.0, "waiting": 6.0, "tool": 6.0}
    assert found.seconds == rollout + update
    assert advice in found.advice and setting in found.command
    assert [label for label, _ in found.rows][:2] == ["all episodes", "update"]
    lines = waterfall_lines(found, 80)
    assert lines[2].count(GLYPHS["sampling"]) == int(rollout / found.seconds * 54)
    assert all(len(line) <= 80 for line in lines[2:-2])


def test_bars_beside_chinese_labels_begin_in_one_column(tmp_path: Path) -> None:
    fill(tmp_path / "a.db", 12.0, 1.0, {})
    with Store.open(tmp_path / "a.db", readonly=True) as store:
        found = of_episode(store, store.episodes.get("e1"))
    labels = ("查询天气", "search")
    rows = [(label, spans) for label, (_, spans) in zip(labels, found.rows, strict=False)]
    lines = waterfall_lines(replace(found, rows=rows), 80)[2:4]
    assert len({cell_len(line.partition("│")[0]) for line in lines}) == 1


def test_the_command_prints_the_same(tmp_path: Path, cli: Cli) -> None:
    db = tmp_path / "a.db"
    fill(db, 12.0, 1.0, {})
    cli.always = ("--db", str(db))
    text = cli("show", "e1", "--time")
    assert "TIME episode e1: 10.00 s" in text and "2 2×a" in text
    found = cli.json("show", "run", "--time")
    assert found["totals"]["sampling"] == 20.0 and found["command"].startswith(
        "agentrl train --set"
    )
    cli("show", "run", "--step", "7", code=2, said="Its last is 1.")
    cli("show", "run", "--step", str(2**63), code=2, said="less than or equal to")
    with Store.open(db, readonly=True) as store:
        assert of_episode(store, store.episodes.get("e1")).report()["seconds"] == 10.0
    assert episode_spans(Episode("e", "t")) == []


# --- JSON Lines, read-only SQL, searching text ---
