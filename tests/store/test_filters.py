"""The filter language against a small store whose answers are known, and its messages for typos.

What was not graded has no reward: NULL in the store, in views, filters, orders, lists and exports, and never 0.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentrl_cli.errors import UsageError
from agentrl_cli.reports.export import export_lines
from agentrl_cli.store import RunRow, Score, Store
from agentrl_cli.store.connection import connect
from agentrl_cli.store.filters import SORTS, compile_filter, compile_sort, fields
from agentrl_cli.store.schema import MIGRATIONS
from agentrl_cli.trainer.metrics import step_metrics
from agentrl_cli.tui.common.episode_view import contrasting_sibling
from agentrl_cli.tui.common.reader import load_view
from agentrl_cli.types import (
    Episode,
    Fact,
    Origin,
    Outcome,
    RewardPart,
    Tokens,
    ToolCall,
    Turn,
    read_fact,
)
from tests.helpers.cli import Cli

EPISODES = {
    # id: (task, step, reward, outcome, flags, text, tool)
    "a": ("calc/0001", 100, 0.0, Outcome.FAILED, ("BADARG",), "price is 4,5", "calculator"),
    "b": ("calc/0002", 110, 1.0, Outcome.SOLVED, (), 'he said "yes"', "calculator"),
    "c": (
        "sql/0001",
        120,
        0.5,
        Outcome.TRUNCATED_TURNS,
        ("LOOP", "TRUNC"),
        "100% sure_thing",
        "run_sql",
    ),
    "d": ("web/100%", 130, -0.2, Outcome.TIMEOUT, ("LOOP",), "back\\slash\nnext Ärger", ""),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(tmp_path_factory.mktemp("filters") / "a.db") as opened:
        opened.runs.add(RunRow(id="r1", name="grpo-07"))
        for n, (name, (task, step, reward, outcome, flags, text, tool)) in enumerate(
            EPISODES.items()
        ):
            calls = (ToolCall("c", tool, {}, "{}"),) if tool else ()
            episode = Episode(
                name,
                task,
                pack=task.split("/")[0],
                run_id="r1" if n < 2 else None,
                step=step,
                seed=n,
                turns=(
                    Turn(
                        0, "assistant", ({"role": "assistant", "content": text},), 0, 0, calls=calls
                    ),
                ),
                tokens=Tokens.empty(),
                reward_parts=(RewardPart("r", reward),),
                outcome=outcome,
                flags=flags,
                advantage=reward - 0.3,
                fact="trained" if n else "skipped:drift",
                started=100.0 + n,
                ended=101.0 + 2 * n,
            )
            opened.episodes.finish(episode)
        opened.episodes.start(Episode("e", "calc/0003", pack="calc", started=200.0))
        opened.marks.tag("b", "seen")
        opened.marks.note("c", "look again")
        opened.runs.add_checkpoint("r1", 110, "x", {}, "best")
        yield opened


def test_limit(store: Store) -> None:
    every = store.episodes.ids("", "-time")
    assert [store.episodes.ids("", "-time", limit=n) for n in (2, 0)] == [every[:2], []]


def ask(store: Store, filter: str, sort: str = "time") -> str:
    return "".join(row.id for row in store.episodes.rows(store.episodes.ids(filter, sort)))


@pytest.mark.parametrize(
    ("filter", "found"),
    [
        ("", "abcde"),
        ("reward:<0.5", "a"),
        ("reward:<=0.5", "ac"),
        ("reward:>0.5", "b"),
        ("reward:>=.5", "bc"),
        ("reward:0.5", "c"),
        ("reward:=0.5", "c"),
        ("reward:-1..0", "a"),
        ("reward:none", "de"),
        ("-reward:none", "abc"),
        ("-reward:<0.5", "bcde"),
        ("step:100..120", "abc"),
        ("step:120..", "cd"),
        ("step:..110", "ab"),
        ("step:100,130", "ad"),
        ("adv:>0.1 adv:<0.5", "c"),
        ("seconds:>=3", "cd"),
        ("task:calc/*", "abe"),
        ("task:CALC/0001", "a"),
        ("task:calc/000?", "abe"),
        ("task:web/100%", "d"),
        ("task:%", ""),
        ("pack:calc,sql", "abce"),
        ("tool:calculator", "ab"),
        ("tool:run_*", "c"),
        ("-tool:*", "de"),
        ("tool:none", "de"),
        ("tag:none,seen run:none", "cde"),
        ("ckpt:none", "acde"),
        ("flag:LOOP", "cd"),
        ("flag:loop flag:trunc", "c"),
        ("flag:BADARG,TRUNC", "ac"),
        ("flag:*", "acd"),
        ("flag:LOO", ""),
        ("flag:none", "be"),
        ("flag:LO*", "cd"),
        ("outcome:failed,timeout", "ad"),
        ("outcome:trunc*", "c"),
        ("outcome:none", "e"),
        ("fact:skipped:drift", "a"),
        ("fact:skipped:*", "a"),
        ("fact:none", "e"),
        ("run:grpo-*", "ab"),
        ("run:r1", "ab"),
        ("-run:grpo-07", "cde"),
        ("ckpt:best", "b"),
        ("-tag:seen", "acde"),
        ("tag:seen", "b"),
        ("note:again", "c"),
        ("note:*", "c"),
        ('text:"4,5"', "a"),
        ("4,5", "a"),
        ('"said \\"yes\\""', "b"),
        ("text:100%", "c"),
        ("text:sure_thing", "c"),
        ("text:suresthing", ""),
        ('text:"back\\\\slash"', "d"),
        ("text:ärger", ""),
        ("text:Ärger", "d"),
        ("text:role", ""),
        ("text:assistant", ""),
        ("text:CALCULATOR", ""),
        ("id:a,b kind:rollout", "ab"),
        ("  reward:<0.5   step:100 ", "a"),
    ],
)
def test_filter(store: Store, filter: str, found: str) -> None:
    assert ask(store, filter) == found


@pytest.mark.parametrize("name", fields())
def test_negation_is_the_complement_for_every_field(store: Store, name: str) -> None:
    number = name in SORTS and name not in ("task", "outcome", "kind")
    value = "0.5" if number else "yes" if name == "text" else "*"
    both = ask(store, f"{name}:{value}") + ask(store, f"-{name}:{value}")
    assert sorted(both) == list("abcde")


@pytest.mark.parametrize(
    ("sort", "found"),
    [
        ("time", "abcde"),
        ("-time", "edcba"),
        ("reward", "acbed"),
        ("-reward", "bcaed"),
        ("outcome,-time", "abdce"),
        ("", "edcba"),
    ],
)
def test_sort(store: Store, sort: str, found: str) -> None:
    assert ask(store, "", sort) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rewrad:<0.5", "reward"),
        ("flags:LOOP", "flag"),
        ("outcome:sloved", "solved"),
        ("reward:high", "needs a number"),
        ("reward:<", "needs a number"),
        ("step:3..1", "smaller number first"),
        ("step:..", "needs a number"),
        ('text:"open', "not closed"),
        ('task:""', "needs a value"),
        ("reward:", "reward: needs a value"),
        ("task:calc/* started:", "time: needs a value"),
        ("outcome=failed", "Write outcome:failed"),
        ("-reward>=0.5", "Write -reward:>=0.5"),
        ("order -rewad", "reward"),
        ("order pack", ""),
    ],
)
def test_a_typo_names_the_nearest(text: str, says: str) -> None:
    compiled = compile_sort if text.startswith("order ") else compile_filter
    with pytest.raises(UsageError) as wrong:
        compiled(text.removeprefix("order "))
    assert says in f"{wrong.value.message} {wrong.value.hint}" and wrong.value.exit_code == 2


@pytest.mark.parametrize("name", fields())
def test_values_never_reach_the_sql(name: str) -> None:
    number = name in SORTS and name not in ("task", "outcome", "kind", "time")
    sql, params = compile_filter(f"{name}:1" if number else f'{name}:"\'; DROP--*"')
    assert "DROP" not in sql and params


def test_facts_of_an_older_store_are_read_and_found_by_todays_names(store: Store) -> None:
    """Eight classes with a reason; before, each reason was a class. An older name finds new rows, too."""
    assert len({fact.kind for fact in Fact}) == 8
    assert all(read_fact(fact.old) == fact and Fact(fact.old) is fact for fact in Fact)
    store.marks.set_facts([("a", "skipped:zero_variance", None)])  # as an older version wrote it
    row = store.episodes.row("a")
    assert row.fact == store.episodes.get("a").fact == Fact.SKIPPED_ZERO_VARIANCE
    for said in (row.fact, "skipped:no_signal", "skipped:zero_variance"):
        assert ask(store, f'fact:"{said}"') == "a"
    store.marks.set_facts([("a", Fact.SKIPPED_GROUP_TOO_SMALL, None)])
    names = ("no_signal", "group_too_small", "zero_variance")
    assert [ask(store, f"fact:skipped:{name}") for name in names] == ["a", "a", ""]
    store.marks.set_facts([("a", Fact.SKIPPED_DRIFT, None)])


# --- what was not graded ---


ERRORS = [outcome for outcome in Outcome if outcome.is_error or outcome is Outcome.TOO_LONG]


def episode_of(name: str, outcome: Outcome, reward: float | None, sample: int) -> Episode:
    tokens = Tokens.from_ids([1, 2], [int(Origin.USER), int(Origin.MODEL)])
    parts = () if reward is None else (RewardPart("r", reward, primary=True),)
    turn = Turn(0, "assistant", ({"role": "assistant", "content": name},), 0, 2)
    return Episode(
        name, "t", "p", run_id="r1", step=1, group_id="g", sample=sample, kind="train", turns=(turn,), tokens=tokens,
        reward_parts=parts, outcome=outcome, started=1.0 + sample, ended=3.0 + sample,
    )  # fmt: skip


GRADED = [
    episode_of("good", Outcome.SOLVED, 1.0, 0),
    episode_of("bad", Outcome.FAILED, 0.0, 1),
    *(episode_of(str(outcome), outcome, None, 2 + n) for n, outcome in enumerate(ERRORS)),
]


@pytest.fixture
def graded(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "agentrl.db") as opened:
        opened.runs.add(RunRow(id="r1", name="run"))
        opened.episodes.add(GRADED)
        yield opened


def listed(store: Store, filter: str = "", sort: str = "time") -> list[str]:
    return [row.id for row in store.episodes.rows(store.episodes.ids(filter, sort))]


def test_rows_views_filters_and_orders_leave_them_out(graded: Store) -> None:
    ungraded = [episode.id for episode in GRADED[2:]]
    rewards = {row.id: row.reward for row in graded.episodes.rows(graded.episodes.ids())}
    assert rewards == {"good": 1.0, "bad": 0.0, **dict.fromkeys(ungraded)}
    found = {said: listed(graded, said) for said in ("reward:<0.1", "reward:none", "-reward:none")}
    assert [*found.values()] == [["bad"], ungraded, ["good", "bad"]]
    for sort, first in (("reward", ["bad", "good"]), ("-reward", ["good", "bad"])):
        order = listed(graded, "", sort)
        assert order[:2] == first and set(order[2:]) == set(ungraded)
    sql = "SELECT episodes, graded, mean, sd, solved, has_signal FROM v_groups"
    assert graded.select(sql) == [(len(GRADED), 2, 0.5, 0.5, 0.5, 1)]
    assert graded.select("SELECT avg(reward), count(reward) FROM v_episodes") == [(0.5, 2)]
    assert graded.stats.group("g", "r1") == (2, 0.5, 0.5)
    assert [task[4:] for task in graded.stats.tasks()] == [(len(GRADED), 0.5, 0.5)]
    graded.marks.retire("r1", "g", ["bad"], Fact.SKIPPED_CUT)  # the cancelled one leaves, too
    assert [task[4:] for task in graded.stats.tasks()] == [(len(GRADED) - 2, 1.0, 1.0)]


def test_read_back_shown_exported_and_measured(graded: Store, cli: Cli) -> None:
    wanted, ids = [1.0, 0.0] + [None] * len(ERRORS), [e.id for e in GRADED]
    assert [graded.episodes.get(id_).reward for id_ in ids] == wanted
    assert [e.reward for e in GRADED] == wanted
    assert [json.loads(line)["reward"] for line in export_lines(graded, ids)] == wanted
    view = load_view(graded, "timeout")
    assert [row.reward for row in view.siblings] == wanted
    assert contrasting_sibling(view) is not None
    metrics = step_metrics([GRADED], dict.fromkeys(ids, Fact.TRAINED))
    assert (metrics["reward"], metrics["solved"]) == (0.5, 0.5)
    graded.flush()
    assert "reward -" in cli("show", "timeout", "--db", str(graded.path))
    shown = cli.json("ls", "--sort", "reward", "--db", str(graded.path))
    assert [row["reward"] for row in shown] == [0.0, 1.0] + [None] * len(ERRORS)


def test_a_store_of_before_is_set_right_by_outcome(tmp_path: Path) -> None:
    path, before = tmp_path / "agentrl.db", [name for name, _ in MIGRATIONS].index("m010_ungraded")
    with Store.open(path) as store:
        store.runs.add(RunRow(id="r1", name="run"))
        store.episodes.add([*GRADED, episode_of("odd", Outcome.TRUNCATED_TOKENS, -1.0, 20)])
        store.episodes.start(Episode("running", "t", run_id="r1"))
        scores = [Score("s", name, 0.5, 0.5, None, "trained", {}) for name in ("good", "timeout")]
        store.scores.add("r1", "s", scores, {})
    with closing(sqlite3.connect(path)) as conn, conn:
        for sql in (
            "UPDATE runs SET claim=''",  # the process that wrote it has ended
            "UPDATE episodes SET reward=0.0 WHERE reward IS NULL AND outcome IS NOT NULL",
            "DELETE FROM _sqlite_migrations WHERE name='m010_ungraded'",
            f"PRAGMA user_version={before}",
        ):
            conn.execute(sql)
    connect(path).close()
    with Store.open(path, readonly=True) as store:
        rewards = {row.id: row.reward for row in store.episodes.rows(store.episodes.ids())}
        none = dict.fromkeys(["running", *map(str, ERRORS)])
        assert rewards == {"good": 1.0, "bad": 0.0, "odd": -1.0, **none}
        assert [score.reward for score in store.scores.get("good")] == [0.5]
        assert store.scores.get("timeout") == []
        assert store.select("SELECT graded FROM v_groups") == [(3,)]
