"""verl's rule-based scorers, `verl.utils.reward_score`, by their published behaviour.

    gsm8k, math_dapo, math_reward, search_r1_like_qa_em      compute_score(solution_str, ground_truth, …)
    default_compute_score                                    chooses one of them by `data_source`

The others (prime_math, prime_code, geo3k, math_verify, sandbox_fusion) need packages or services of their own: install
verl for them.
"""

from __future__ import annotations

import operator
import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from agentrl_cli.errors import EnvError
from agentrl_cli.tasks.forms import find_braces

_NUMBER = re.compile(r"-?[0-9.,]+")
_MARKED = re.compile(rf"#### ({_NUMBER.pattern})")
_CLIP = 300
"""Characters at the end of an answer that are read."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LABELLED = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")


def gsm8k_solution(solution_str: str, method: str = "strict") -> str | None:
    """Return the number after the last `####` (strict), or the last number (flexible); None if absent."""
    text = solution_str[-_CLIP:]
    if method == "strict":
        marked = _MARKED.findall(text)
        return marked[-1].replace(",", "") if marked else None
    numbers = _NUMBER.findall(text)
    return next(
        (number for number in reversed(numbers) if number != "."), numbers[0] if numbers else None
    )


def gsm8k(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for the right number, `format_score` for another, 0 without one."""
    answer = gsm8k_solution(solution_str, method)
    return 0.0 if answer is None else score if answer == ground_truth else format_score


def last_boxed(text: str) -> str | None:
    r"""Return the last `\boxed{…}` with its braces; None if absent or not closed."""
    return find_braces(text, text.rfind("\\boxed{"))


def _unbox(text: str | None) -> str:
    return "[INVALID]" if text is None else text[len("\\boxed{") : -1]


_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REMOVED = (
    *"square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents".split(),
    *"degrees cm gm pounds meters meals edges students childrentickets multiples \\text{s} \\text{.}".split(),
    *(
        "\\text{\ns}",
        "\\text{}^2",
        "\\text{}^3",
        "\\text{\n}",
        "\\text{}",
        r"\mathrm{th}",
        r"^\circ",
    ),
    *(r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots"),
)


def normalise(answer: str) -> str:
    """Return a final answer as Minerva's evaluation compares it."""
    answer = answer.rsplit("=", maxsplit=1)[-1]
    for before, after in (*_REPLACED, *((text, "") for text in _REMOVED)):
        answer = answer.replace(before, after)
    answer = re.sub(r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$", answer)
    for name in ("text", "textbf", "overline"):
        answer = re.sub(rf"(\\{name}\{{)(.*?)(\}})", r"\2", answer)
    answer = re.sub(r"(\\boxed\{)(.*)(\})", r"\2", answer)
    answer = re.sub(r"(frac)([^{])(.)", r"frac{\2}{\3}", answer)
    answer = re.sub(r"(sqrt)([^{])", r"sqrt{\2}", answer).replace("$", "")
    return (answer.replace(",", "") if answer.replace(",", "").isdigit() else answer).strip()


def math_dapo(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return 1 or −1 for the text after the last `Answer:` among the last 300 characters (or for the last box)."""
    text = solution_str[-_CLIP:]
    if strict_box_verify:
        text = text[pause_tokens_index[-1] - 100 :] if pause_tokens_index else text[-100:]
        said = _unbox(last_boxed(text))
        right = said == ground_truth
    else:
        found = _LABELLED.findall(text)
        said = normalise(found[-1] if found else "[INVALID]")
        right = said == normalise(ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": said}


def math_boxed(text: str) -> str | None:
    r"""Return the last `\boxed …` up to a dollar sign, else the last `\boxed{…}` or `\fbox{…}`; None if absent."""
    _, spaced, tail = text.rpartition("\\boxed ")
    if spaced:
        return spaced + tail.partition("$")[0]
    return find_braces(text, text.rfind("\\boxed" if "\\boxed" in text else "\\fbox"))


def math_unbox(boxed: str) -> str:
    r"""Return the content of a `\boxed`. Raises ValueError for another form."""
    for left, right in (("\\boxed ", ""), ("\\boxed{", "}")):
        if left in boxed:
            if boxed.startswith(left) and boxed.endswith(right):
                return boxed[len(left) : len(boxed) - len(right)]
            break
    raise ValueError(f"{boxed!r:.100} is not a box.")


def math_reward(solution_str: str, ground_truth: str) -> float:
    r"""Return 1 if the last `\boxed` is the truth, spaces and spelling of fractions apart; else 0."""
    said = math_boxed(solution_str)
    if said is None or ground_truth is None:
        return 0.0
    try:
        answer = math_unbox(said)
    except ValueError:
        return 0.0
    try:
        return float(plain_latex(answer) == plain_latex(ground_truth))
    except ValueError:  # one of them is not LaTeX: then only the same text is the same
        return float(answer == ground_truth)


_SPELLINGS = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
    ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
)  # fmt: skip
_WHOLE = re.compile(r"(-?[1-9][0-9]*|0)/(-?[1-9][0-9]*|0)")


def plain_latex(text: str) -> str:
    """Return an answer as the Hendrycks MATH evaluation compares it. Raises ValueError for broken LaTeX."""
    for before, after in _SPELLINGS:
        text = text.replace(before, after)
    text, *units = text.split("\\text{ ")
    if len(units) > 1:
        raise ValueError("two units")
    for before, after in (("\\\\%", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0.")):
        text = text.replace(before, after)
    text = f"0{text}" if text.startswith(".") else text
    head, *tails = text.split("=")
    text = tails[0] if len(tails) == 1 and len(head) <= 2 else text
    text = _full_fractions(_full_roots(text).replace(" ", ""))
    text = "\\frac{1}{2}" if text == "0.5" else text
    return f"\\frac{{{found[1]}}}{{{found[2]}}}" if (found := _WHOLE.fullmatch(text)) else text


def _full_roots(text: str) -> str:
    r"""Return the text with `\sqrt3` as `\sqrt{3}`."""
    head, *roots = text.split("\\sqrt")
    if "" in roots:
        raise ValueError("a root of nothing")
    return head + "".join(
        f"\\sqrt{root if root[0] == '{' else f'{{{root[0]}}}{root[1:]}'}" for root in roots
    )


def _full_fractions(text: str) -> str:
    r"""Return the text with `\frac12` as `\frac{1}{2}`; as it is if one of its fractions has one part."""
    head, *fractions = text.split("\\frac")
    for place, fraction in enumerate(fractions):
        if not fraction:
            raise ValueError("a fraction of nothing")
        if fraction[0] == "{":
            continue
        if len(fraction) < 2:
            return text
        below = "{" if fraction[1] == "{" else f"{{{fraction[1]}}}"
        fractions[place] = f"{{{fraction[0]}}}{below}{fraction[2:]}"
    return "\\frac".join([head, *fractions])


def _words(text: str) -> str:
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def search_r1(
    solution_str: str,
    ground_truth: Mapping[str, Any],
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
    *,
    fits: Callable[[str, str], bool] = operator.eq,
) -> float:
    """Return `score` if the last `<answer>` fits one of `target`, articles and punctuation apart.

    `format_score` for another answer, 0 without one. For the same words a quarter of `score`, if there are many tags.
    """
    found, target = _ANSWER.findall(solution_str), ground_truth["target"]
    if not found:
        return 0.0
    wanted, answer = [target] if isinstance(target, str) else target, _words(found[-1].strip())
    if not any(fits(answer, _words(text)) for text in wanted):
        return format_score
    tags = max(solution_str.count("<answer>"), solution_str.count("</answer>"))
    return score / 4 if tags > 10 and fits is operator.eq else score


search_r1_contains = partial(search_r1, fits=operator.contains)
"""The same for an answer that contains one of `target`, however many tags there are."""


_SOURCES: dict[str, Callable[..., Any]] = {
    r"openai/gsm8k": gsm8k,
    r"lighteval/MATH|DigitalLearningGmbH/MATH-lighteval|HuggingFaceH4/MATH-500": math_reward,
    r"math_dapo|math|math_dapo_reasoning|aime.*": math_dapo,
    r"searchR1_.*": search_r1,
}


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> Any:
    """Return the scorer of a data source, as verl chooses it. Raises EnvError for one that needs verl itself."""
    for pattern, scorer in _SOURCES.items():
        if re.fullmatch(pattern, data_source, re.DOTALL):
            return scorer(solution_str, ground_truth)
    raise EnvError(
        f"verl's scorer for the data source {data_source!r} needs verl itself.",
        hint="pip install verl, or name another.",
    )


_MATH = {
    "compute_score": math_reward,
    "last_boxed_only_string": math_boxed,
    "remove_boxed": math_unbox,
}
MODULES: dict[str, dict[str, Any]] = {
    "gsm8k": {"compute_score": gsm8k, "extract_solution": gsm8k_solution},
    "math_dapo": {
        "compute_score": math_dapo,
        "normalize_final_answer": normalise,
        "last_boxed_only_string": last_boxed,
        "remove_boxed": _unbox,
    },
    "math_reward": _MATH,
    "math": _MATH,
    "search_r1_like_qa_em": {"compute_score": search_r1, "compute_score_subem": search_r1_contains},
}
"""Modules of `verl.utils.reward_score` and their functions."""
PACKAGE = {
    "default_compute_score": default_compute_score,
    "_default_compute_score": default_compute_score,
    **{name: SimpleNamespace(**functions) for name, functions in MODULES.items()},
}
"""Names of `verl.utils.reward_score` itself."""
