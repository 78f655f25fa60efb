"""The pure parts of the screens: exact token texts, layers, line breaking, curves."""

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.reports.compare import METRICS
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.filters import compile_filter
from agentrl_cli.tui.app import is_light, light_background
from agentrl_cli.tui.chat.view import LINES
from agentrl_cli.tui.common import charts, episode_view
from agentrl_cli.tui.common.episode_list import filter_text
from agentrl_cli.tui.common.layers import LAYERS, map_line
from agentrl_cli.tui.common.layout import Kind, Layout, call_notes
from agentrl_cli.tui.common.plain_text import align_rows, fit_columns
from agentrl_cli.tui.common.text import clip, keep_end, pad, quote, wrap
from agentrl_cli.tui.common.token_text import PARTIAL, TokenTexts, visible
from agentrl_cli.tui.common.tree import fork_depths, indentation, spans
from agentrl_cli.tui.replay import inspector
from agentrl_cli.tui.replay.menus import whatif_text
from agentrl_cli.tui.replay.plain import token_rows
from agentrl_cli.tui.replay.reading import Fold, plain_lines, reading_lines
from agentrl_cli.tui.runs.data import RunSummary, head_line, run_line
from agentrl_cli.tui.watch.panels import TITLES
from agentrl_cli.tui.whatif.view import reward_lines
from agentrl_cli.types import (
    Episode,
    Origin,
    Outcome,
    RewardPart,
    Tokens,
    ToolCall,
    TrainSignals,
    Turn,
)
from tests.helpers import trees
from tests.helpers import tui_demo as demo
from tests.helpers.growth import exponent
from tests.helpers.processes import run_code

NAN = math.nan


def signals(n: int, **arrays: list[float]) -> TrainSignals:
    nan = np.full(n, np.nan, np.float32)
    given = {name: np.asarray(values, np.float32) for name, values in arrays.items()}
    clipped = given.pop("clipped", np.zeros(n)).astype(np.int8)
    base = {"advantage": nan, "logp_train": nan, "ratio": nan, "weight": nan, **given}
    return TrainSignals(clipped=clipped, **base)


def model_tokens(origin: list[int], logp: list[float] | None = None) -> Tokens:
    given = Tokens.from_ids(list(range(len(origin))), np.asarray(origin, np.int8))
    known = given.logp_policy if logp is None else np.asarray(logp, np.float32)
    return Tokens(given.ids, given.origin, known, known, known, given.top_ids, given.top_logps)


def test_texts_join_to_the_decoded_text_and_partial_characters_show_where_they_end() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("é日<tool_call>x\n")
    texts = TokenTexts(tokenizer.json).texts(ids)
    assert texts == [PARTIAL, "é", PARTIAL, PARTIAL, "日", "<tool_call>", "x", "\n"]
    assert "".join(texts).replace(PARTIAL, "") == tokenizer.decode(ids)


def test_a_byte_level_vocabulary_needs_no_library() -> None:
    words = demo.Words()
    ids = words.encode("<|im_start|>user\nThe total is 57.9 é\n<|im_end|>")
    code = (
        "import sys, json; from agentrl_cli.tui.common.token_text import TokenTexts\n"
        "ids, data = json.loads(sys.stdin.read())\n"
        "print(TokenTexts(data).text(ids), end='')\n"
        "assert 'tokenizers' not in sys.modules"
    )
    assert (
        run_code(code, input=json.dumps([ids, words.json()])).stdout
        == "<|im_start|>user\nThe total is 57.9 é\n<|im_end|>"
    )


def test_a_vocabulary_that_is_not_byte_level_goes_through_tokenizers() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert TokenTexts(tokenizer.to_str()).texts([0, 1]) == ["hello", "world"]


@pytest.mark.parametrize(
    "broken", [None, "", "{", "{}", '{"model": 3}', '{"model": {"vocab": null}}']
)
def test_without_a_usable_tokenizer_tokens_show_as_ids(broken: str | None) -> None:
    decoder = TokenTexts(broken)
    assert decoder.problem and decoder.texts([5, 70000]) == ["⟨5⟩", "⟨70000⟩"]


def test_every_layer_survives_missing_numbers_and_has_one_glyph_per_class() -> None:
    tokens = model_tokens([0, 4, 5, 9])
    for layer in LAYERS.values():
        assert len({level.glyph for level in layer.levels}) == len(layer.levels), layer.name
        for given in (None, signals(4)):
            found = layer.classify(tokens, given, 1.0)
            assert found.shape == (4,) and found.max() < len(layer.levels), layer.name


def test_a_negative_weight_on_a_token_that_was_not_sampled_stands_out() -> None:
    episode = Episode("e", "t", turns=(Turn(0, "user", (), 0, 3),), tokens=model_tokens([1, 1, 4]))
    given = signals(3, weight=[0.0, -0.5, NAN])
    view = episode_view.make_view(episode, TokenTexts(), signals=given)
    assert episode_view.next_flagged(view, 2) == 1
    assert any("mask bug: weight on 1" in text for _, text in view.reasons)


def view_of(text: str, width: int, **options: Any) -> Layout:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    turn = Turn(0, "assistant", (), 0, len(ids))
    tokens = Tokens.from_ids(ids, [Origin.MODEL] * len(ids))
    episode = Episode("e", "t", turns=(turn,), tokens=tokens)
    return Layout(episode_view.make_view(episode, TokenTexts(tokenizer.json)), width, **options)


@pytest.mark.parametrize("width", [8, 13, 40])
def test_lines_hold_every_token_once_and_never_exceed_the_width(width: int) -> None:
    layout = view_of("def f(x):\n\treturn x\n\n日本語日本語 <tool_response> the end", width)
    lines = [(a, b) for kind, a, b in layout.lines if kind == Kind.TEXT]
    pieces = [piece for a, b in lines for piece in range(a, b)]
    assert pieces == list(range(len(layout.piece_token)))
    assert set(layout.piece_token) == set(range(len(layout.view.tokens)))
    assert all(sum(layout.piece_cells[a:b]) <= width for a, b in lines)
    for token in range(len(layout.view.tokens)):
        assert layout.token_at(layout.line_of(token), layout.cell_of(token)) == token


def test_a_mark_without_width_at_the_end_of_a_turn_has_a_line() -> None:
    view = view_of("ab", 20).view
    layout = Layout(replace(view, texts=["a\n", "\u0301"]), 20)
    assert [layout.line_of(token) for token in (0, 1)] == [1, 3]


def test_blocks_cover_every_token_of_a_half_written_episode() -> None:
    blocks = episode_view.blocks_of([Turn(0, "user", (), 0, 3), Turn(2, "tool", (), 5, 99)], 8)
    assert [(b.role, b.start, b.end) for b in blocks] == [
        ("user", 0, 3),
        ("tokens", 3, 5),
        ("tool", 5, 8),
    ]


def test_numbers_and_messages_of_a_long_episode_cost_by_its_length(tmp_path: Path) -> None:
    """A conversation of thousands of turns is read and printed in seconds."""
    with Store.open(tmp_path / "long.db") as store:
        for count in (25, 200):
            writer = demo.Writer(demo.Words(), 1)
            for _ in range(count):
                writer.assistant("a word" * 20)
            long = Episode(f"e{count}", "t", turns=tuple(writer.turns), tokens=writer.tokens())
            store.episodes.finish(long.with_(advantage=1.0, outcome=Outcome.SOLVED))
            store.signals.add(long.id, demo.signals_of(long))
        assert exponent(lambda n: deque(token_rows(store, f"e{n}"), 0), 25) < 1.3
    said = Turn(0, "user", ({"role": "user", "content": "yes"},), 0, 0)
    turns = {n: tuple(replace(said, index=at) for at in range(n)) for n in (500, 4000)}
    talks = {n: Episode("e", "t", turns=found) for n, found in turns.items()}
    assert exponent(lambda n: reading_lines(talks[n], 80, Fold(frozenset(), False)), 500) < 1.3


def test_call_notes_show_code_on_its_own_lines_and_errors() -> None:
    code = ToolCall("1", "run_python", {"code": "a = 1\nprint(a)"}, "")
    assert [text.strip() for _, text in call_notes(code)] == [
        "▸ run_python",
        "code:",
        "│ a = 1",
        "│ print(a)",
    ]
    assert call_notes(ToolCall("1", "", None, "{", "not JSON"))[1] == ("error", "  not JSON")


@pytest.mark.parametrize(
    ("layer", "origin", "arrays", "shown"),
    [
        (
            "weight",
            [0, 4, 4, 4, 4, 4, 3],
            {"weight": [NAN, 1.0, 0.2, -0.2, -0.9, 0.0, NAN], "clipped": [0, 0, 0, 0, 0, 1, 0]},
            ".#+-=~.",
        ),
        ("advantage", [4, 4, 0], {"advantage": [0.0, 0.0, NAN]}, "00."),
        ("mask", [0, 4, 5], {"weight": [0.1, 0.1, NAN]}, "XTf"),
        (
            "ratio",
            [4] * 5,
            {"ratio": [1.0, 0.5, 2.0, 2.0, NAN], "clipped": [0, 0, 0, 1, 0]},
            "_<>~.",
        ),
    ],
)
def test_layers_tell_direction_strength_clipping_and_what_may_train(
    layer: str, origin: list[int], arrays: dict[str, list[float]], shown: str
) -> None:
    levels = LAYERS[layer].levels
    found = LAYERS[layer].classify(model_tokens(origin), signals(len(origin), **arrays), 0)
    assert "".join(levels[level].glyph for level in found) == shown


def test_glyph_rows_and_folds_are_as_asked() -> None:
    for asked, rows in (("sampled", 2), ("all", 2), ("none", 0)):
        lines = view_of("a\nb", 20, glyphs=asked).lines
        assert sum(kind == Kind.GLYPH for kind, _, _ in lines) == rows
    layout = view_of("a\nb\nc", 20, folded=frozenset({0}))
    assert layout.lines == [(Kind.HEAD, 0, 0)] and layout.line_of(2) == 0
    layout = view_of("a\nb", 20, glyphs="none")
    near = {(0, 1): 1, (1, 1): 2, (2, -1): 1, (9, -1): 2}
    assert {place: layout.text_line_near(*place) for place in near} == near


def test_every_curve_has_a_title_and_a_run_s_next_step_is_whole_or_left_out() -> None:
    assert [name for name in METRICS if not TITLES.get(name, "")[:2].isupper()] == []
    run = RunSummary(RunRow("1", "depot1-grpo-2", kind="train", status="finished"), 9, 0.4)
    shown = [run_line(run, width).plain.partition("  show ")[2].strip() for width in range(80, 160)]
    heads = ["next: agentrl …" in head_line(width) for width in range(80, 160)]
    assert {*shown[:70]} == {"", "depot1-grpo-2"} and heads[-1]
    assert all(head or not text for text, head in zip(shown, heads, strict=True))


LONE = np.where(np.arange(1000) == 503, 3, 0).astype(np.int8)
AT = np.asarray
FIELDS = {"filter": "-tag:seen", "task": "calc/*", "step": "3..9", "text": "two words", "flag": ""}
# A function of the screens, what it is given, and its answer.
PURE: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = [
    (wrap, ("请问明天上海的天气怎么样 hello", 10), ["请问明天上", "海的天气怎", "么样 hello"]),
    (wrap, ("  one two  three abcdefghij", 7), ["one two", "three", "abcdefg", "hij"]),
    (wrap, ("", 7), [""]),
    (clip, ("上海的天气", 6), "上海 …"),
    (clip, ("上海的", 6), "上海的"),
    (clip, ("abcdef", 4), "abc…"),
    (clip, ("abcd", 4), "abcd"),
    (keep_end, ("商店/乘法-001", 9), "…乘法-001"),
    (keep_end, ("商店", 4), "商店"),
    (pad, ("乘法", 6), "乘法  "),
    (pad, ("long", 2), "long"),
    (quote, ('a "b"',), '"a \\"b\\""'),
    (visible, ("a\n\tb\x01",), "a⏎⇥b␀1"),
    # a lone trained token is kept
    (map_line, (LONE, 7, 50), [*[0] * 25, 3, *[0] * 24]),
    (episode_view.first_difference, (AT([1, 2, 3]), AT([1, 9, 3])), 1),
    (episode_view.first_difference, (AT([1, 2]), AT([1, 2, 3])), 2),
    (episode_view.first_difference, (AT([1]), AT([1])), None),
    (episode_view.blocks_of, ([], 0), ()),
    (charts.sparkline, ([0, 1, 2, math.nan], 4), "▁▅█ "),
    (charts.counts_line, ([0, 0, 9, -9], 3), "█ ▃"),
    *(
        (charts.short, (value,), text)
        for value, text in (
            (0.41234, "0.412"),
            (1234.5, "1,234"),
            (1e-5, "1e-05"),
            (math.nan, "-"),
            (None, "-"),
        )
    ),
    *(
        (charts.span, (seconds,), text)
        for seconds, text in ((3.2, "3.2 s"), (37, "37 s"), (720, "12 min"), (10380, "2 h 53"))
    ),
    # forms make the lines that are checked
    (filter_text, (FIELDS,), '-tag:seen task:calc/* step:3..9 text:"two words"'),
    (lambda fields: bool(compile_filter(filter_text(fields))), (FIELDS,), True),
    (
        whatif_text,
        ({"turn": "2", "n": "4", "T": "0.7", "seed": "", "model": "a@best"},),
        "turn=2 n=4 T=0.7 model=a@best",
    ),
    # the light theme follows the terminal
    *(
        (is_light, (theme, {"COLORFGBG": colours} if colours else {}), light)
        for theme, colours, light in (
            ("light", "", True),
            ("dark", "0;15", False),
            ("auto", "0;default;15", True),
            ("auto", "15;0", False),
        )
    ),
    *(
        (light_background, (answer,), light)
        for answer, light in (
            (b"\x1b]11;rgb:ffff/fafa/f0f0\x1b\\\x1b[?62;22c", True),
            (b"\x1b]11;rgb:ff/ff/ff\x07", True),
            (b"\x1b]11;rgb:1010/1010/1414\x1b\\", False),
            (b"\x1b[?62c", False),
        )
    ),
    # the tree of turns
    (fork_depths, (trees.episode(trees.chain()).parents,), [0] * 6),
    (fork_depths, (trees.episode(trees.fork()).parents,), [0, 0, 0, 0, 1, 1]),
    (fork_depths, (trees.episode(trees.sub_agent()).parents,), [0, 0, 1, 1, 0, 0]),
    (
        lambda one: list(indentation(one).values()),
        (trees.episode(trees.three_leaves()),),
        ["", "", "", "", "└", " ", "└"],
    ),
    (spans, ([0, 1, 2, 4, 6, 7],), "0-2 4 6-7"),
    # a narrow terminal loses columns and no id
    *(
        (
            fit_columns,
            (["id", "run", "task", "tags"], [["1m82d1n8xp7zet", "x" * 30, "t" * 40, None]], *given),
            kept,
        )
        for *given, kept in (
            (("tags", "run"), 80, ([0, 2], ["tags", "run"])),
            (("tags", "run"), 10, ([0], ["tags", "run", "task"])),
            (("tags",), None, ([0, 1, 2, 3], [])),
        )
    ),
]


@pytest.mark.parametrize(("function", "given", "wanted"), PURE)
def test_texts_are_cut_padded_and_shortened_by_the_cells_that_they_take(
    function: Callable[..., Any], given: tuple[Any, ...], wanted: Any
) -> None:
    assert function(*given) == wanted


def test_columns_beside_chinese_names_are_straight() -> None:
    part = {"value": 1.25, "weight": 1.0, "detail": "", "primary": True, "fakeable": False}
    parts = [{**part, "name": name} for name in ("exact", "答案正确")]
    after = {"before": parts[:1], "after": parts, "same": True, "episode": "", "total_before": 1.0,
             "total_after": 2.0, "advantage_after": None}  # fmt: skip
    graded = Episode(
        "e", "t", reward_parts=tuple(RewardPart(str(one["name"]), 1.25, 1.0) for one in parts)
    )
    shown = episode_view.EpisodeView(graded, [], ())
    for lines in (
        [line.plain for line in LINES["reward"]({"total": 2.0, "parts": parts})],
        [line.plain for line in reward_lines(after, 60)],
        [line.plain for line in inspector.reward_lines(shown)],
    ):
        ends = {cell_len(line.rpartition("1.25")[0]) for line in lines if "1.25" in line}
        assert len(ends) == 1, lines
    indented = plain_lines('  "结果": "总价为五十七块九毛钱"', 12)
    assert "".join(line.plain for line in indented) == '  "结果": "总价为五十七块九毛钱"'
    assert max(line.cell_len for line in indented) <= 12
    lines = list(align_rows(["name", "steps"], [["数学", 1], ["calc", 22]]))
    assert lines == ["name  steps", "数学      1", "calc     22"]


def test_curves_and_numbers_are_drawn_short_and_without_a_crash() -> None:
    rows = charts.braille([(0, 0.0), (1, math.nan), (2, 1.0)], 10, 3, (0, 1))
    assert [len(row) for row in rows] == [10, 10, 10]
    two = [(0.0, 0.1), (10.0, 0.9)]
    lines = charts.chart("x", two, 30, 4, unit=True, marks=[5])
    assert len(lines) == 6 and "┴" in lines[-1].plain and all(line.cell_len <= 30 for line in lines)
    assert " 2 points " in charts.chart("x", two, 30, 4)[-1].plain  # joined by a line
    many = [[(x, x % 7) for x in range(n)] for n in (30, 68, 69, 400)]
    axes = [charts.chart("x", points, 40, 4)[-1].plain for points in many]
    for axis, means in zip(axes, (None, None, 2, 6), strict=True):
        assert "points" not in axis and ("means" in axis) == (f" means of {means} " in axis)
    assert (
        " means of 6 " in axes[3]
        and "no data yet" in charts.chart("x", [(0, math.nan)], 30, 4)[1].plain
    )
    log = [
        line.plain
        for line in charts.chart("x", [(1, 0.01), (2, 100.0), (3, -1.0)], 30, 4, log=True)
    ]
    assert "100" in log[1] and "0.01" in log[4]
    assert "-1" in charts.chart("x", [(1, -1.0), (2, -0.5)], 30, 4, log=True)[4].plain
