"""Conditions over the fields of a row: `reward >= 0.8 and response.usage.output_tokens < 2000`.

The text is read once, by Python's own parser but never by its evaluator: what is not on the list below is
refused with a caret under it. Nothing in it can hang or grow: no powers, no repeated text, no loops but over
the lists of the row, and regular expressions that take linear time (RE2).

True is 1 and false is 0 where a number is asked for. A missing field is null, and what is asked of null or of
a value of another type has no answer. As in SQL, `and`, `or` and `not` carry that on where it matters, so
that `not (reward < 0.5)` does not let in a row without a reward. `x == null` and `has(x)` ask for it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rollbook.data.expression_functions import FUNCTIONS, Trouble, regex_test, type_name
from rollbook.errors import UsageError
from rollbook.records.numbers import is_number

LONGEST = 10_000  # characters
_DEEPEST = 100
_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_WHOLE = "row"  # `row["key with space"]`

Row = Mapping[str, Any]
Getter = Callable[[Row], Any]

_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}


class Expression:
    """`answer(row)` is true, false, or None where the row does not say; `why` then says what was amiss."""

    def __init__(self, text: str) -> None:
        compiler = _Compiler(text)
        self.text = text
        self._trouble = compiler.trouble
        self._truth = compiler.truth(compiler.tree, 0)

    def answer(self, row: Row) -> bool | None:
        self._trouble.clear()
        answer: bool | None = self._truth(row)
        return answer

    @property
    def why(self) -> str:
        return self._trouble.first or "null"


def field_path(text: str) -> list[str | int]:
    """The steps of a field as it is typed: `response.usage.output_tokens`, `tags[0]`, `row["odd name"]`."""
    compiler = _Compiler(text)
    path = compiler.path(compiler.tree)
    if path is None:
        raise compiler.refuse(compiler.tree, "not a field; write it like response.usage.output_tokens")
    return path


def value_at(row: Any, path: Sequence[str | int]) -> Any:
    """None where the way ends: a missing field is null."""
    for step in path:
        if isinstance(step, str):
            row = row.get(step) if isinstance(row, Mapping) else None
        else:
            row = row[step] if isinstance(row, list) and -len(row) <= step < len(row) else None
        if row is None:
            return None
    return row


class _Compiler:
    def __init__(self, text: str) -> None:
        self.text = " ".join(text.split("\n")).strip()
        self.trouble = Trouble()
        if len(self.text) > LONGEST:
            raise UsageError(f"the expression is longer than {LONGEST} characters")
        try:
            self.tree = ast.parse(self.text, mode="eval").body
        except SyntaxError as error:
            # Without a place: it ended too early.
            column = error.offset - 1 if error.offset else len(self.text)
            raise self._refuse_at(column, f"not understood: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise UsageError(f"the expression is not understood: {error}") from None

    def refuse(self, node: ast.AST, why: str) -> UsageError:
        # The parser counts bytes of UTF-8; the caret stands below characters.
        before = self.text.encode()[: getattr(node, "col_offset", 0)].decode(errors="ignore")
        return self._refuse_at(len(before), why)

    def _refuse_at(self, column: int, why: str) -> UsageError:
        start = max(0, column - 60)
        shown = self.text[start : start + 100]
        known = ", ".join(sorted([*FUNCTIONS, "has", "matches", "any", "all"]))
        return UsageError(
            f"{why}\n  {shown}\n  {' ' * (column - start)}^\n"
            f"functions: {known}\n"
            'operators: and or not, == != < <= > >=, in, + - * / %; fields: a.b[0], row["odd name"]'
        )

    def truth(self, node: ast.expr, depth: int) -> Getter:
        """A closure whose value is true, false or None; anything else the row holds there has no answer."""
        value, trouble, text = self.value(node, depth), self.trouble, self._source(node)
        if isinstance(node, ast.Compare | ast.BoolOp) or _is_not(node):
            return value
        is_literal = isinstance(node, ast.Constant) and not isinstance(node.value, bool | None)
        if is_literal or isinstance(node, ast.BinOp | ast.List | ast.Tuple):
            raise self.refuse(node, "this is a value, not a condition")

        def checked(row: Row) -> Any:
            found = value(row)
            if found is None or isinstance(found, bool):
                return found
            return trouble.add(f"{text} is {type_name(found)}, not true or false")

        return checked

    def value(self, node: ast.expr, depth: int) -> Getter:
        if depth > _DEEPEST:
            raise self.refuse(node, "nested too deeply")
        depth += 1
        if (path := self.path(node)) is not None:
            return self._field(path, self._source(node))
        match node:
            case ast.Name(id=name) if name in _CONSTANTS:
                constant = _CONSTANTS[name]
                return lambda _: constant
            case ast.Constant(value=constant) if isinstance(constant, bool | int | float | str | None):
                return lambda _: constant
            case ast.List(elts=items) | ast.Tuple(elts=items):
                parts = [self.value(item, depth) for item in items]
                return lambda row: [part(row) for part in parts]
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return _negated(self.truth(operand, depth))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
                number = self.value(operand, depth)
                zero: Getter = lambda _: 0  # noqa: E731
                apply = operator.sub if isinstance(sign, ast.USub) else operator.add
                return self._arithmetic(apply, zero, number, self._source(node))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                sides = self.value(left, depth), self.value(right, depth)
                return self._arithmetic(_ARITHMETIC[type(op)], *sides, self._source(node))
            case ast.BoolOp(op=op, values=values):
                parts = [self.truth(part, depth) for part in values]
                return _joined(parts, isinstance(op, ast.Or))
            case ast.Compare():
                return self._comparison(node, depth)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return self._call(node, name, arguments, depth)
            case ast.Attribute() | ast.Subscript():
                raise self.refuse(node, 'a field is written a.b, a[0] or a["b"]')
        raise self.refuse(node, "this has no place in a condition")

    def path(self, node: ast.expr) -> list[str | int] | None:
        steps: list[str | int] = []
        while True:
            match node:
                case ast.Attribute(value=inner, attr=name):
                    steps.append(name)
                case ast.Subscript(value=inner, slice=ast.Constant(value=str() | int() as key)):
                    steps.append(key)
                case ast.Subscript(
                    value=inner, slice=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as key))
                ):
                    steps.append(-key)
                case ast.Name(id=name) if name not in _CONSTANTS and (name != _WHOLE or steps):
                    return [*([name] if name != _WHOLE else []), *reversed(steps)]
                case _:
                    return None
            if len(steps) > _DEEPEST:
                raise self.refuse(node, "nested too deeply")
            node = inner

    def _field(self, path: list[str | int], text: str) -> Getter:
        trouble = self.trouble

        def get(row: Row) -> Any:
            found = value_at(row, path)
            return trouble.add(f"{text} is missing") if found is None else found

        return get

    def _arithmetic(self, apply: Callable[[Any, Any], Any], left: Getter, right: Getter, text: str) -> Getter:
        trouble = self.trouble

        def compute(row: Row) -> Any:
            one, two = left(row), right(row)
            if one is None or two is None:
                return None
            if not (is_number(one) and is_number(two)):
                return trouble.add(f"{text}: of {type_name(one)} and {type_name(two)}")
            try:
                return apply(one, two)
            except (ZeroDivisionError, OverflowError) as error:
                return trouble.add(f"{text}: {error}")

        return compute

    def _comparison(self, node: ast.Compare, depth: int) -> Getter:
        sides = [node.left, *node.comparators]
        parts = []
        for op, left, right in zip(node.ops, sides, sides[1:], strict=False):
            text = f"{self._source(left)} {self._source(right)}"
            one, two = self.value(left, depth), self.value(right, depth)
            if isinstance(op, ast.Eq | ast.NotEq) and (_is_null(left) or _is_null(right)):
                parts.append(self._null_test(right if _is_null(left) else left, depth))
            elif isinstance(op, ast.Eq | ast.NotEq):
                parts.append(_equality(one, two))
            elif isinstance(op, ast.In | ast.NotIn):
                parts.append(self._membership(one, two, text))
            elif type(op) in _ORDER:
                parts.append(self._order(_ORDER[type(op)], one, two, text))
            else:
                raise self.refuse(left, "compare with ==, !=, <, <=, >, >=, in or not in")
            if isinstance(op, ast.NotEq | ast.NotIn):
                parts[-1] = _negated(parts[-1])
        return parts[0] if len(parts) == 1 else _joined(parts, False)

    def _order(self, holds: Callable[[Any, Any], bool], left: Getter, right: Getter, text: str) -> Getter:
        trouble = self.trouble

        def compare(row: Row) -> Any:
            one, two = left(row), right(row)
            if one is None or two is None:
                return None
            if (is_number(one) and is_number(two)) or (isinstance(one, str) and isinstance(two, str)):
                return holds(one, two)
            return trouble.add(f"{text}: {type_name(one)} against {type_name(two)}")

        return compare

    def _membership(self, left: Getter, right: Getter, text: str) -> Getter:
        trouble = self.trouble

        def find(row: Row) -> Any:
            one, two = left(row), right(row)
            if one is None or two is None:
                return None
            if isinstance(two, list):
                return any(one == item for item in two)
            if isinstance(two, str) and isinstance(one, str):
                return one in two
            return trouble.add(f"{text}: {type_name(one)} in {type_name(two)}")

        return find

    def _null_test(self, node: ast.expr, depth: int) -> Getter:
        value, trouble = self.value(node, depth), self.trouble

        def is_null(row: Row) -> bool:
            before = trouble.first
            found = value(row)
            trouble.first = before  # to ask whether it is there is no trouble
            return found is None

        return is_null

    def _call(self, node: ast.expr, name: str, arguments: list[ast.expr], depth: int) -> Getter:
        if name in ("any", "all"):
            return self._over_items(node, name, arguments, depth)
        if name == "has":
            if len(arguments) != 1 or self.path(arguments[0]) is None:
                raise self.refuse(node, "has() takes one field")
            return _negated(self._null_test(arguments[0], depth))
        trouble, text = self.trouble, self._source(node)
        if name == "matches":
            match arguments:
                case [subject, ast.Constant(value=str() as pattern) as literal]:
                    subject_of = self.value(subject, depth)
                    try:
                        return regex_test(subject_of, pattern, text, trouble)
                    except ValueError as error:
                        raise self.refuse(literal, f"not a regular expression (RE2): {error}") from None
            raise self.refuse(node, 'matches(field, "pattern") takes the pattern as text')
        if name not in FUNCTIONS:
            raise self.refuse(node, f"no function {name}()")
        function = FUNCTIONS[name]
        if not function.least <= len(arguments) <= function.most:
            raise self.refuse(node, f"{name}() is written {function.usage}")
        parts = [self.value(argument, depth) for argument in arguments]

        def call(row: Row) -> Any:
            values = [part(row) for part in parts]
            if any(value is None for value in values):
                return None
            answer = function.apply(*values)
            if answer is None:
                return trouble.add(f"{text}: of {', '.join(map(type_name, values))}")
            return answer

        return call

    def _over_items(self, node: ast.expr, name: str, arguments: list[ast.expr], depth: int) -> Getter:
        match arguments:
            case [
                ast.GeneratorExp(
                    elt=condition,
                    generators=[ast.comprehension(target=ast.Name(id=item), iter=source, ifs=[], is_async=0)],
                )
            ]:
                items_of, holds = self.value(source, depth), self.truth(condition, depth)
            case _:
                raise self.refuse(node, f'{name}() is written {name}(x.type == "message" for x in list)')
        is_any, trouble, text = name == "any", self.trouble, self._source(source)

        def fold(row: Row) -> Any:
            items = items_of(row)
            if items is None:
                return None
            if not isinstance(items, list):
                return trouble.add(f"{text} is {type_name(items)}, not a list")
            return _fold((holds({**row, item: entry}) for entry in items), is_any)

        return fold

    def _source(self, node: ast.expr) -> str:
        return ast.get_source_segment(self.text, node) or ""


def _is_not(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _is_null(node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id in ("null", "None")
    return isinstance(node, ast.Constant) and node.value is None


def _equality(left: Getter, right: Getter) -> Getter:
    def compare(row: Row) -> bool | None:
        one, two = left(row), right(row)
        return None if one is None or two is None else bool(one == two)

    return compare


def _negated(truth: Getter) -> Getter:
    def negate(row: Row) -> bool | None:
        answer = truth(row)
        return None if answer is None else not answer

    return negate


def _joined(parts: list[Getter], is_or: bool) -> Getter:
    return lambda row: _fold((part(row) for part in parts), is_or)


def _fold(answers: Iterable[bool | None], is_or: bool) -> bool | None:
    """`or` (`and`) over answers of which some may be unknown: one true (false) settles it."""
    is_unknown = False
    for answer in answers:
        if answer is is_or:
            return is_or
        is_unknown = is_unknown or answer is None
    return None if is_unknown else not is_or
