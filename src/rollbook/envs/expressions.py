"""The value of an arithmetic expression that a model wrote, without ever evaluating code.

Only numbers, the operators of arithmetic and brackets are read; lengths, sizes and exponents are bounded,
so that no expression takes noticeable time or memory.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

LONGEST = 500  # characters
_MOST_BITS = 4096
_LARGEST_EXPONENT = 1024
_DEEPEST = 60

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class ExpressionError(ValueError):
    """An expression with no value here; the message is for the model to read."""


def evaluate(expression: str) -> str:
    """The value as text: `2.5`, and `4` rather than `4.0`."""
    if len(expression) > LONGEST:
        raise ExpressionError(f"the expression is longer than {LONGEST} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExpressionError("this is not an arithmetic expression") from None
    try:
        return _written(_value(tree.body, 0))
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None
    except OverflowError:
        raise ExpressionError("the result is too large") from None


def _value(node: ast.expr, depth: int) -> Number:
    if depth > _DEEPEST:
        raise ExpressionError("the expression is nested too deeply")
    match node:
        case ast.Constant(value=value) if isinstance(value, int | float) and not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand, depth + 1))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, depth + 1), _value(right, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left, depth + 1), _value(right, depth + 1)))
        case ast.BinOp(op=ast.BitXor()):
            raise ExpressionError("write a power as **, not ^")
    raise ExpressionError("only numbers, + - * / // % ** and brackets are allowed")


def _power(base: Number, exponent: Number) -> Number:
    if abs(exponent) > _LARGEST_EXPONENT:
        raise ExpressionError(f"an exponent may be at most {_LARGEST_EXPONENT}")
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _MOST_BITS:
        raise ExpressionError("the result is too large")
    result = base**exponent
    if isinstance(result, complex):
        raise ExpressionError("the result is not a real number")
    return _bounded(result)


def _bounded(value: Number) -> Number:
    too_large = value.bit_length() > _MOST_BITS if isinstance(value, int) else not math.isfinite(value)
    if too_large:
        raise ExpressionError("the number is too large")
    return value


def _written(value: Number) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)
