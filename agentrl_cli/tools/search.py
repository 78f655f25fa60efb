"""`search`: a local BM25 index over JSONL or a folder of texts, or an HTTP retriever.

The index is bm25s's (https://github.com/xhluca/bm25s), built for the first episode and shared by all; words of
CJK text are its characters and pairs of characters. Documents are JSONL rows with `contents` or `text` (optionally `id`
and `title`), or the .txt and .md files of a folder, split
into groups of paragraphs. A retriever answers POST {"queries", "topk", "return_scores"} with {"result": [[{"document",
"score"}]]}, as in Search-R1.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_cli.errors import ConfigError, DataError, EnvError, PolicyError
from agentrl_cli.hooks.threads import in_thread
from agentrl_cli.hooks.waits import waiting
from agentrl_cli.policies.remote.http import Endpoint
from agentrl_cli.tools.base import Tool, ToolContext
from agentrl_cli.tools.schema import tool_schema
from agentrl_cli.types import ToolResult

PIECE = 1200
"""Approximate characters of one piece of a text file."""
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
"""Kana, Han and Hangul: written without spaces, or searched by parts of words."""
_CJK = re.compile(f"[{CJK}]+")
WORD = rf"(?u)\b\w\w+\b|[{CJK}]"
"""bm25s's words of two characters and more, and single CJK characters."""


@dataclass(frozen=True, slots=True)
class Document:
    """A searchable piece of text."""

    id: str
    title: str
    text: str


def search(query: str, top_k: int = 3) -> ToolResult:
    """Search the documents for words and return the best passages.

    Args:
        query: Words that the passage should have.
        top_k: How many passages.
    """
    raise NotImplementedError("SearchTool.execute searches.")


class SearchTool(Tool):
    """`corpus`: a JSONL file or a folder (relative to the pack), or `url`: a retriever. A row's `corpus` wins
    over both.

    `anywhere`: rows may also name files outside the pack's folder.
    """

    name = "search"
    schema = tool_schema(search)
    pure = True
    examples = ({"query": "largest moon of Saturn"}, {"query": "rivers in Peru", "top_k": 2})

    def __init__(
        self,
        corpus: str = "",
        *,
        url: str = "",
        top_k: int = 10,
        width: int = 600,
        seconds: float = 10.0,
        anywhere: bool = False,
    ) -> None:
        if corpus and url:
            raise ConfigError("search takes a corpus or a url, not both.")
        if top_k < 1 or width < 1:
            raise ConfigError("The limits of search (top_k, width) must be above 0.")
        self.corpus, self.url, self.most, self.width, self.seconds = (
            corpus,
            url,
            top_k,
            width,
            seconds,
        )
        self.timeout, self.anywhere = seconds, anywhere
        self.folder: Path | None = None

    def own_limits(self) -> dict[str, Any]:
        return {"passages": self.most, "characters of a passage": self.width}

    def at(self, folder: Path) -> SearchTool:
        tool = copy.copy(self)
        tool.folder = folder
        return tool

    async def create(self, ctx: ToolContext) -> str:
        own = ctx.task.data.get("corpus") if ctx.task is not None else None
        source = str(own or self.corpus)
        if not source and not self.url:
            hint = "Name one: {name: search, config: {corpus: …}}"
            raise EnvError("search has neither a corpus nor a url.", hint=hint)
        home = (self.folder or Path()).resolve()
        if own and not self.anywhere and not (home / source).resolve().is_relative_to(home):
            raise EnvError(
                f"The row's corpus {source} lies outside of its pack.",
                hint="Put it into the pack's folder, or let rows name any: {name: search, config: {anywhere: true}}.",
            )
        if source:  # now: a first search that waits for a large index would run out of its time
            with waiting(f"the index of {source}, which is built once"):
                await in_thread(index_of, (self.folder or Path()) / source)
        return source

    async def execute(self, state: str, arguments: dict[str, Any]) -> ToolResult:
        query, count = str(arguments["query"]), int(arguments.get("top_k", 3))
        if not query.strip() or count < 1:
            return ToolResult(
                "Error: query needs words, and top_k must be above 0.", error="bad_arguments"
            )
        count = min(count, self.most)
        if state:
            path = (self.folder or Path()) / state
            found = await in_thread(lambda: index_of(path).search(query, count))
        else:
            found = await self._remote(query, count)
        return ToolResult(self.show(found), metrics={"found": float(len(found))})

    def show(self, found: list[Document]) -> str:
        """Passages as shown to the model."""
        if not found:
            return "No passage has these words."
        return "\n".join(
            f"[{n}] {d.title + ': ' if d.title else ''}{' '.join(d.text.split())[: self.width]}"
            for n, d in enumerate(found, 1)
        )

    shown = show
    """The name in projects that were copied from search-task before it was a verb."""

    async def _remote(self, query: str, count: int) -> list[Document]:
        endpoint = Endpoint(self.url, concurrency=1, timeout=self.seconds, retries=2)
        try:
            answer = await endpoint.post(
                "", {"queries": [query], "topk": count, "return_scores": True}
            )
        except PolicyError as error:
            raise EnvError(f"The retriever failed: {error.message}", hint=error.hint) from error
        finally:
            await endpoint.close()
        try:
            return [_to_document(item) for item in answer["result"][0][:count]]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EnvError(
                f"The retriever answered in another form: {json.dumps(answer)[:200]}"
            ) from error


def add_spaces(text: str) -> str:
    """Return the text with its runs of CJK characters as words: each character, and each pair of neighbours."""
    return _CJK.sub(
        lambda run: f" {' '.join((*run[0], *map(''.join, itertools.pairwise(run[0]))))} ", text
    )


def _to_document(item: Mapping[str, Any]) -> Document:
    """`{"document": {"contents": "title\\ntext"}}`, or the document itself."""
    given = item.get("document", item)
    if isinstance(given, str):
        return Document("", "", given)
    text = str(given.get("contents") or given.get("text") or "")
    title = str(given.get("title") or "")
    if not title and "\n" in text:
        title, _, text = text.partition("\n")
    return Document(str(given.get("id") or ""), title.strip('"'), text)


class Index:
    """Documents and their BM25 weights."""

    def __init__(self, documents: list[Document]) -> None:
        import bm25s

        self.documents = documents
        self._bm25s = bm25s
        texts = [add_spaces(f"{d.title} {d.text}") for d in documents]
        tokens = bm25s.tokenize(texts, stopwords=None, show_progress=False, token_pattern=WORD)
        self._retriever = bm25s.BM25()
        self._retriever.index(tokens, show_progress=False)

    def search(self, query: str, count: int) -> list[Document]:
        """Return the best documents that share a word with the query, best first; ties in the order of the corpus."""
        options = {
            "stopwords": None,
            "return_ids": False,
            "show_progress": False,
            "token_pattern": WORD,
        }
        words = self._bm25s.tokenize([add_spaces(query)], **options)[0]
        known = [word for word in words if word in self._retriever.vocab_dict]
        if not known:
            return []
        scores = self._retriever.get_scores(known)
        order = sorted(range(len(self.documents)), key=lambda n: (-float(scores[n]), n))[:count]
        return [self.documents[n] for n in order if scores[n] > 0]


_INDEXES: dict[tuple[str, int], Index] = {}
_BUILDING = threading.Lock()


def index_of(path: Path) -> Index:
    """Return the index of a corpus, built once per version. Raises EnvError if the corpus is missing or empty,
    DataError.
    """
    if not path.exists():
        raise EnvError(f"The corpus {path} does not exist.")
    files = (
        [path]
        if path.is_file()
        else sorted(
            p for p in path.rglob("*") if p.suffix in (".txt", ".md", ".jsonl") and p.is_file()
        )
    )
    key = (
        str(path.absolute()),
        hash(tuple((str(file), file.stat().st_mtime_ns) for file in files)),
    )
    with _BUILDING:
        if key not in _INDEXES:
            documents = [document for file in files for document in read_documents(file)]
            if not documents:
                raise EnvError(f"The corpus {path} is empty.")
            _INDEXES[key] = Index(documents)
        return _INDEXES[key]


def read_documents(path: Path) -> list[Document]:
    """Return the documents of a file. Raises DataError naming the bad line, or a file that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}.") from error
    if path.suffix == ".jsonl":
        lines = enumerate(text.split("\n"), 1)  # splitlines() cuts at U+2028, which JSON may hold
        return [_document(path, number, line) for number, line in lines if line.strip()]
    return [Document(f"{path.name}:{n}", path.stem, piece) for n, piece in enumerate(pieces(text))]


def _document(path: Path, number: int, line: str) -> Document:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}:{number}: not JSON: {error}") from error
    text = row.get("contents") or row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{path}:{number}: a document needs `contents` or `text`.")
    return Document(str(row.get("id", number)), str(row.get("title") or ""), text)


def pieces(text: str) -> list[str]:
    """Splits a text into pieces of whole paragraphs, about PIECE characters each."""
    out: list[str] = []
    for paragraph in text.split("\n\n"):
        if not paragraph.strip():
            continue
        if out and len(out[-1]) + len(paragraph) < PIECE:
            out[-1] += "\n\n" + paragraph
        else:
            out.append(paragraph.strip())
    return out


TOOL = SearchTool()
