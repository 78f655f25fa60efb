"""Jinja with limits: a template from a stranger's model folder can neither run for ever nor fill the memory.

Jinja's sandbox bounds `range` alone. Here all that a rendering does is counted: iterations of loops, calls of macros,
and, by their length, the texts and lists that filters, methods, operators and outputs read and write. What would become
too large is refused before it is made. Counts and not seconds, so that a template is refused everywhere or nowhere.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

from jinja2 import Environment, nodes
from jinja2 import TemplateError as JinjaError
from jinja2.compiler import CodeGenerator, Frame
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_STEPS = 2_000_000
"""Iterations and calls of one rendering; a hundred characters or items that are read or written count as one."""
MOST_TEXT = 2**25
"""Characters of a text, or of all the texts inside a list; no request for a conversation is longer."""
MOST_ITEMS = 2**20
"""Items of a list."""
MOST_BITS = 2**14
"""Bits of a number."""
WEIGHT = 100
MACRO = 4
"""Steps that a call of a macro takes, besides its own."""
ITEM = 32
"""Characters that an item of a list counts as, besides its own."""

_WRITES = (
    "string",
    "pprint",
    "xmlattr",
    "format",
    "urlencode",
    "escape",
    "e",
    "forceescape",
    "safe",
)
"""Filters that write a value as text, and all that is inside it."""
_ANY_NUMBER = ("default", "d", "truncate")
"""Filters that make nothing of the size of a number that they are given."""
_LEFT_OUT = ("urlize", "striptags", "wordwrap")
"""Filters for web pages, whose time is not proportional to their text."""
_COMPARES = "in eq == equalto ne != lt < lessthan le <= gt > greaterthan ge >=".split()
"""Tests that read a whole text."""
_NUMBER = re.compile(r"\d+")


class TooMuch(JinjaError):
    """A rendering has no steps left, or would make something too large."""


class _Generator(CodeGenerator):
    """Calls the environment's own methods, which `_Counting` adds, without the checks for those of a template."""

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.write(f"environment.{node.node.name}(")
        for arg in node.args:
            self.visit(arg, frame)
            self.write(", ")
        self.write(")")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders within the limits; each rendering begins with `start`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        """`filters` besides Jinja's."""
        super().__init__(finalize=self.check_output, **options)
        self.filters |= filters
        self._budget = threading.local()  # of the rendering that a thread makes
        del self.globals["lipsum"]
        for name in _LEFT_OUT:
            del self.filters[name]
        self.filters |= {
            name: self._filter(name, function) for name, function in self.filters.items()
        }
        tests: dict[str, Any] = self.tests
        self.tests |= {name: self._test(tests[name]) for name in _COMPARES}

    code_generator_class = _Generator

    def start(self) -> None:
        """Count a rendering, or a compilation, of this thread from zero."""
        self._budget.left = MOST_STEPS

    def step(self, size: int = 0) -> bool:
        """Count a step that reads or writes `size` characters or items. Raises TooMuch."""
        self._budget.left -= 1 + size // WEIGHT
        if self._budget.left < 0:
            raise TooMuch(f"it takes more than {MOST_STEPS} steps")
        return True

    def charge(self, value: Any) -> Any:
        """Return the value, its length counted."""
        self.step(_length(value))
        return value

    def check_output(self, value: Any) -> Any:
        """Return the value, if it is not too large to be written as text.

        Texts are counted as pieces of their output.
        """
        if not isinstance(value, str):
            self.step(_written_length(value))
        return value

    def join_texts(self, *values: Any) -> str:
        """Return the values as one text, as the operator `~` does."""
        self._require(sum(map(_written_length, values)))
        return "".join(map(str, values))

    def concat(self, pieces: Iterable[str]) -> str:
        """Return the text of the pieces of an output."""
        found, length = [], 0
        for piece in pieces:
            length += len(piece)
            self._require(length, len(piece))
            found.append(piece)
        return "".join(found)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._require_items(*_measure_operator(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(
            getattr(__obj, "__wrapped__", __obj), "__self__", None
        )  # the sandbox wraps `format`
        if isinstance(owner, str):
            if __obj.__name__ == "join" and args:
                args = ([*args[0]],)
                __self._require(_measure_result("join", args[0], [owner]))
            elif made := _measure_result(__obj.__name__, owner, [*args, *kwargs.values()]):
                __self._require(made)
        return __self.charge(super().call(__context, __obj, *args, **kwargs))

    def _require(self, length: int, new: int | None = None) -> None:
        """Raise TooMuch for a text of such a length, of which `new` characters are counted (None: all)."""
        if length > MOST_TEXT:
            raise TooMuch(f"it makes a text of more than {MOST_TEXT} characters")
        self.step(length if new is None else new)

    def _require_items(self, length: int, items: int, bits: int) -> None:
        if items > MOST_ITEMS:
            raise TooMuch(f"it makes a list of more than {MOST_ITEMS} items")
        if bits > MOST_BITS:
            raise TooMuch(f"it makes a number of more than {MOST_BITS} bits")
        self._require(length)
        self.step(items)

    def _filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def count_and_call(*args: Any, **kwargs: Any) -> Any:
            own = sum(isinstance(arg, Context | EvalContext | Environment) for arg in args[:1])
            if name == "join" and len(args) > own and not isinstance(args[own], str):
                args = (*args[:own], [*args[own]], *args[own + 1 :])
            value, *rest = [*args[own:], *kwargs.values()] or [None]
            self.step(_length(value) + sum(map(_length, rest)))
            if rest and name not in _ANY_NUMBER and (number := max(map(_whole, rest))):
                self._require_items(0, number, number if name == "round" else 0)
            if made := _measure_result(name, value, rest):
                self._require(made)
            return self.charge(function(*args, **kwargs))

        return count_and_call

    def _test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def count_and_call(*args: Any) -> Any:
            self.step(sum(map(_length, args)))
            return function(*args)

        return count_and_call

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Counting().visit(source), *args, **kwargs)


class _Counting(NodeTransformer):
    """Adds the counts to a template: a step in every loop and macro, and the lengths of operands."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call(node, "step"), lineno=node.lineno))
        if node.test is not None:  # items that do not pass have no body
            node.test = nodes.And(_call(node, "step"), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        cost = _call(node, "step", nodes.Const(MACRO * WEIGHT))
        node.body.insert(0, nodes.ExprStmt(cost, lineno=node.lineno))
        return node

    visit_CallBlock = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(node, "join_texts", *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for operand in node.ops:  # what is compared with a constant takes no longer than that
            if not isinstance(operand.expr, nodes.Const | nodes.List | nodes.Tuple) and (
                "in" in operand.op or not isinstance(node.expr, nodes.Const)
            ):
                operand.expr = _call(node, "charge", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _call(node, "charge", node.node)
        return node


def _call(at: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Call:
    """Return a call of a method of the environment, which no name of the template can hide."""
    return nodes.Call(
        nodes.EnvironmentAttribute(name), list(args), [], None, None, lineno=at.lineno
    )


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict) else 0


def _whole(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _written_length(value: Any) -> int:
    """Return the characters of a value as text, about; lists count with all that is inside. Raises TooMuch.

    A list may hold another one many times, and so on inside: the text grows with every mention.
    """
    if isinstance(value, str):
        return len(value)
    length, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        length += ITEM + _length(item)
        if length > MOST_TEXT:
            raise TooMuch(f"it makes a text of more than {MOST_TEXT} characters")
        if isinstance(item, Mapping):
            waiting += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            waiting += item
    return length


def _measure_operator(operator: str, left: Any, right: Any) -> tuple[int, int, int]:
    """Return characters, items and bits of an operator's result, at most."""
    if operator == "%" and isinstance(left, str):
        return _format_length(left, right if isinstance(right, tuple) else [right]), 0, 0
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length(), right.bit_length()
        return 0, 0, left.bit_length() * max(right, 0) if operator == "**" else sum(bits)
    both = left, right
    if operator == "*":
        times = max(map(_whole, both))
        text = sum(len(value) for value in both if isinstance(value, str))
        items = sum(len(value) for value in both if isinstance(value, list | tuple))
        return text * times, items * times, 0
    text = sum(len(value) for value in both if isinstance(value, str))
    return text, sum(len(value) for value in both if isinstance(value, list | tuple)), 0


def _measure_result(name: str, value: Any, args: Sequence[Any]) -> int:
    """Return the characters of a filter's or method's result, at most; 0 if that is no longer than the value."""
    most = max(map(_whole, args), default=0)
    text = value if isinstance(value, str) else ""
    match name:
        case "center" | "ljust" | "rjust" | "zfill":
            return len(text) + most
        case "expandtabs":
            return len(text) + text.count("\t") * max(most, 8)
        case "indent":
            return len(text) + (text.count("\n") + 1) * max(most, *map(_length, args), 4)
        case "replace":
            old, new, *_ = [*(arg for arg in args if isinstance(arg, str)), "", ""]
            return len(text) + text.count(old) * len(new)
        case "join":
            return _written_length(value) + _length(value) * max(map(_length, args), default=0)
        case "tojson":
            return _written_length(value) * (1 + most)
        case "sum":
            return _length(value) ** 2 if any(isinstance(arg, list | tuple) for arg in args) else 0
        case "format" | "format_map":
            return _format_length(text, args)
        case "translate":
            return len(text) * max(
                (_length(v) for a in args if isinstance(a, dict) for v in a.values()), default=1
            )
        case "encode":
            raise TooMuch("it makes bytes, which no conversation has")
    return _written_length(value) if name in _WRITES else 0


def _format_length(text: str, args: Sequence[Any]) -> int:
    """Return the characters of a format with its values: each place may take the longest value, or as many as a
    number says.
    """
    places = text.count("{") + text.count("%")
    widths = [int(number[:12]) for number in _NUMBER.findall(text)]
    values = [
        max(_written_length(arg), _whole(arg)) for arg in args if not isinstance(arg, Undefined)
    ]
    return len(text) + places * max([0, *widths, *values])
