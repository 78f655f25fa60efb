"""Prose and names use the words of docs/style.md, whose table is the only list."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    "agentrl_cli",
    "sandbox",
    "tasks",
    "benchmarks",
    "recipes",
    "docs",
    "tests",
    "README.md",
    "CONTRIBUTING.md",
)
# Files that name the words.
LISTS = {"docs/style.md", "tests/guards/test_words.py"}
# Text that models read, and names of things in their tasks. It does not change for style.
MODEL = {
    "agentrl_cli/evaluate/abilities.py": {"seat", "seats"},
    "recipes/tiny_tools/words.py": {"park", "seat", "shelf", "told"},
    "benchmarks/bundled.md": {"shelf"},
    "benchmarks/bundled_functions.py": {"shelf", "shelves"},
    "benchmarks/bundled_subjects.py": {"shelf", "shelves"},
    "tests/evaluate/test_check.py": {"seat"},
    "agentrl_cli/rewards/judge.py": {"where there is no"},
    "agentrl_cli/tools/session.py": {"is no x", "go on with"},
    "benchmarks/rollout_tools.py": {"what is asked"},
    "tests/tools/test_tools.py": {"is no x", "go on with"},
}
# Words after `is no` that make good English. So does `there` before it.
FINE = r"(?!longer\b|more\b|other\b|one\b)"


@functools.cache
def words() -> dict[str, str]:
    """Each checked phrase of the table with the words to write instead."""
    table = (ROOT / "docs/style.md").read_text(encoding="utf-8").partition("## Words")[2]
    found: dict[str, str] = {}
    for line in table.splitlines():
        if line.startswith("| ") and "---" not in line and not line.startswith("| instead of"):
            left, right = (cell.strip() for cell in line.strip("|").split("|")[:2])
            phrases = [
                phrase.strip().lower() for phrase in re.sub(r"\([^)]*\)", "", left).split(",")
            ]
            found |= {phrase: right for phrase in phrases if not phrase.endswith("*")}
    return found


def pattern(phrases: dict[str, str]) -> re.Pattern[str]:
    """One expression for all phrases. Line breaks count as spaces, underscores end a word."""
    parts = sorted(map(_expression, phrases), key=len, reverse=True)
    return re.compile(rf"(?<![a-z])(?:{'|'.join(parts)})(?![a-z])")


def _expression(phrase: str) -> str:
    if phrase.endswith(" no x"):
        verb = phrase.removesuffix(" no x")
        return rf"(?<!there ){verb}\s+no\s+{FINE}[a-z]+"
    return re.escape(phrase).replace(r"\ ", r"[\s_#]+")


def files(rooms: set[str]) -> Iterator[Path]:
    for room in sorted(rooms):
        path = ROOT / room
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = file.relative_to(ROOT).as_posix()
            if file.suffix in (".py", ".md") and name not in LISTS:
                yield file


def problems(
    name: str, text: str, phrases: dict[str, str], wanted: re.Pattern[str]
) -> Iterator[str]:
    for found in wanted.finditer(text.lower()):
        phrase = next(p for p in phrases if re.fullmatch(_expression(p), found[0]))
        if phrase not in MODEL.get(name, ()):
            yield f"{name}:{text.count(chr(10), 0, found.start()) + 1}: {phrase!r}: write {phrases[phrase]}"


def test_files_use_the_words_of_the_style_guide() -> None:
    phrases = words()
    expression = pattern(phrases)
    found = [
        problem
        for file in files(set(ROOMS))
        for problem in problems(
            file.relative_to(ROOT).as_posix(), file.read_text("utf-8"), phrases, expression
        )
    ]
    assert not found, "\n".join(["See docs/style.md.", *found])


def test_every_phrase_of_the_table_is_found() -> None:
    phrases = words()
    assert len(phrases) > 50
    for phrase, better in phrases.items():
        text = f"x = 1\n# Here {phrase.replace(' x', ' store')} stands.\n"
        assert list(problems("a.py", text, phrases, pattern(phrases))) == [
            f"a.py:2: {phrase!r}: write {better}"
        ]
    for text in (
        "a shelfish name",
        "told_you = nobody_else",
        "There is no store.",
        "it is no longer\n so",
        "set\n# aside",
    ):
        expected = {"told_you = nobody_else": 2, "set\n# aside": 1}.get(text, 0)
        assert len(list(problems("a.py", text, phrases, pattern(phrases)))) == expected, text
