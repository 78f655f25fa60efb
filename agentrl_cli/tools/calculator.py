"""`calculator`: exact arithmetic by a walk over the syntax tree. No `eval`, no names, no attributes.

Numbers are fractions, so 0.1 + 0.2 is 0.3 and 10 / 4 * 4 is 10. Every operation is bounded before it is done: a
result of more than MAX_BITS bits is refused, so no expression can take long or fill the memory.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from agentrl_cli.tools.base import FunctionTool
from agentrl_cli.types import ToolResult

MAX_BITS = 4096
"""Maximum bits of a numerator or denominator: about 1,200 digits."""
MAX_LENGTH = 1000
"""Maximum characters of an expression."""
MAX_FACTORIAL = 400
SIGNS = str.maketrans("×·÷−–", "**/--")
DIGITS = 15
"""Significant digits of a result without an exact decimal form."""


class CalculatorError(ValueError):
    """An expression that cannot be computed; the model reads the message."""


def calculator(expression: str) -> ToolResult:
    """Compute an arithmetic expression exactly, e.g. (12 + 3) * 4.5 ** 2.

    Args:
        expression: Numbers, + - * / // % **, parentheses, abs round min max sqrt floor ceil gcd lcm factorial.
    """
    try:
        return ToolResult(show(compute(expression)))
    except CalculatorError as error:
        return ToolResult(f"Error: {error}", error="exception")


def compute(expression: str) -> Fraction:
    """Return the exact value. Raises CalculatorError with the reason."""
    text = expression.strip().translate(SIGNS)
    if not text:
        raise CalculatorError("the expression is empty")
    if len(text) > MAX_LENGTH:
        raise CalculatorError(f"the expression has more than {MAX_LENGTH} characters")
    try:
        return _value(ast.parse(text, mode="eval", feature_version=(3, 11)).body, text)
    except SyntaxError as error:
        place = f" at character {error.offset}" if error.offset else ""
        raise CalculatorError(f"cannot read {_short(text)!r}{place}") from error
    except (RecursionError, MemoryError, ValueError) as error:
        if isinstance(error, CalculatorError):
            raise
        raise CalculatorError(
            "the expression is nested too deeply or holds too long a number"
        ) from error


def show(value: Fraction) -> str:
    """Return an integer, an exact decimal of at most 30 places if one exists, else 15 significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    rest, twos, fives = value.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    places = max(twos, fives)
    if rest == 1 and places <= 30:
        digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
        return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    quotient = Decimal(value.numerator) / Decimal(value.denominator)
    # A float ends at 1e308, and below 1e-308 it has fewer digits, or is 0.
    plain = -300 < quotient.adjusted() < 300
    return f"{float(value) if plain else quotient:.{DIGITS}g}"


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() as number):
            return _check_size(Fraction(number))
        case ast.Constant(value=float()):  # of which the digits as written count, not 17 of them
            return _decimal(ast.get_source_segment(text, node) or "")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, text)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, text)
        case ast.BinOp(op=op, left=left, right=right):
            return _binary(op, _value(left, text), _value(right, text))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return _call(name, [_value(argument, text) for argument in args])
        case ast.Name(id=name):
            raise CalculatorError(f"there are no variables here ({_short(name)}), only numbers")
        case ast.BinOp() | ast.UnaryOp() | ast.Compare() | ast.BoolOp():
            raise CalculatorError("only + - * / // % ** are known")
        case ast.Tuple():
            raise CalculatorError("write numbers without commas")
    raise CalculatorError(f"{type(node).__name__} is not arithmetic")


def _decimal(text: str) -> Fraction:
    try:
        number = Decimal(text)
    except InvalidOperation as error:  # the exponent has more than 18 digits
        raise CalculatorError("an exponent is too large") from error
    if number and abs(number.adjusted()) > MAX_BITS:  # before the fraction writes out its zeros
        raise CalculatorError(f"{_short(text)} is too large or too close to 0")
    return _check_size(Fraction(number))


def _binary(op: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    if isinstance(op, ast.Pow):
        return _power(left, right)
    if isinstance(op, (ast.Div, ast.FloorDiv, ast.Mod)) and right == 0:
        raise CalculatorError("division by zero")
    if isinstance(op, ast.BitXor):
        raise CalculatorError("^ is not known, write ** for powers")
    function = OPERATORS.get(type(op))
    if function is None:
        raise CalculatorError("only + - * / // % ** are known")
    return _check_size(Fraction(function(left, right)))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent == Fraction(1, 2):
        return _sqrt(base)
    if base == 0 and exponent < 0:
        raise CalculatorError("division by zero")
    if exponent.denominator != 1 and base not in {0, 1}:
        if base < 0:
            raise CalculatorError("a root of a negative number")
        return _inexact(lambda: float(base) ** float(exponent))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and base != 0 and bits * abs(exponent.numerator) > MAX_BITS + bits:
        raise CalculatorError("the result is too large")
    if base in {0, 1, -1}:
        return (
            Fraction(1) if exponent == 0 else base if exponent.numerator % 2 or base >= 0 else -base
        )
    return _check_size(base**exponent.numerator)


def _call(name: str, args: list[Fraction]) -> Fraction:
    if name not in FUNCTIONS:
        raise CalculatorError(
            f"there is no function {_short(name)}; there are: {', '.join(FUNCTIONS)}"
        )
    low, high, function = FUNCTIONS[name]
    if not low <= len(args) <= high:
        raise CalculatorError(
            f"{name} takes {low if low == high else f'at least {low}'} number(s), not {len(args)}"
        )
    return _check_size(Fraction(function(args)))


def _sqrt(value: Fraction) -> Fraction:
    if value < 0:
        raise CalculatorError("a root of a negative number")
    top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if top * top == value.numerator and bottom * bottom == value.denominator:
        return Fraction(top, bottom)
    return _inexact(lambda: math.sqrt(value))


def _inexact(function: Callable[[], float]) -> Fraction:
    try:
        number = function()
    except OverflowError as error:
        raise CalculatorError("the result is too large") from error
    if number < 1e-300:  # a float below has fewer digits, or is 0
        raise CalculatorError("the result is too close to 0")
    return Fraction(repr(number))


def _whole(value: Fraction, name: str) -> int:
    if value.denominator != 1:
        raise CalculatorError(f"{name} takes whole numbers")
    return value.numerator


def _factorial(args: Sequence[Fraction]) -> int:
    number = _whole(args[0], "factorial")
    if not 0 <= number <= MAX_FACTORIAL:
        raise CalculatorError(f"factorial takes 0 to {MAX_FACTORIAL}")
    return math.factorial(number)


def _round(args: Sequence[Fraction]) -> Fraction:
    places = _whole(args[1], "round") if len(args) > 1 else 0
    if abs(places) > DIGITS * 2:
        raise CalculatorError(f"round takes at most {DIGITS * 2} places")
    return Fraction(round(args[0], places))


def _check_size(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculatorError("the result is too large")
    return value


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

FUNCTIONS: dict[str, tuple[int, int, Callable[[list[Fraction]], Any]]] = {
    "abs": (1, 1, lambda args: abs(args[0])),
    "round": (1, 2, _round),
    "min": (1, 99, min),
    "max": (1, 99, max),
    "sqrt": (1, 1, lambda args: _sqrt(args[0])),
    "floor": (1, 1, lambda args: math.floor(args[0])),
    "ceil": (1, 1, lambda args: math.ceil(args[0])),
    "gcd": (2, 99, lambda args: math.gcd(*(_whole(arg, "gcd") for arg in args))),
    "lcm": (2, 9, lambda args: math.lcm(*(_whole(arg, "lcm") for arg in args))),
    "factorial": (1, 1, _factorial),
}
"""Maps a name to (minimum, maximum) number of arguments and the function on their list."""

TOOL = FunctionTool(calculator, pure=True, examples=({"expression": "(12 + 3) * 4.5 ** 2"},))
