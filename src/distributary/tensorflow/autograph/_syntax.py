"""Statements that diastatic-malt does not know, rewritten with those that it knows.

for x in xs:                       broke_1 = False
if x > 2:                      for x in xs:
break                          if x > 2:
else:                ->                    broke_1 = True
x = 0                                  break
if not broke_1:
x = 0
"""

import ast
import itertools
from collections.abc import Sequence
from typing import Any, final

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@final
class Simplified(ast.NodeTransformer):
    """Rewrites `else` of loops, `match`, and `:=` in the condition of `while`.

    Raises:
        NotImplementedError: for what stays unknown.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        return self._without_else(node)

    def visit_While(self, node: ast.While) -> Any:
        self.generic_visit(node)
        result = self._without_else(node)
        if any(isinstance(part, ast.NamedExpr) for part in ast.walk(node.test)):
            ends = ast.If(ast.UnaryOp(ast.Not(), node.test), [_like(node, ast.Break())], [])
            node.body.insert(0, _like(node, ends))
            node.test = _like(node, ast.Constant(True))
        return result

    def visit_Match(self, node: ast.Match) -> Any:
        self.generic_visit(node)
        name = f"matched_{next(self._numbers)}"
        chain: list[ast.stmt] = []
        for case in reversed(node.cases):
            test, taken = self._test_of(name, case.pattern)
            if case.guard is not None:
                if taken:
                    raise NotImplementedError("`match` has a pattern with both a name and `if`")
                test = ast.BoolOp(ast.And(), [test, case.guard])
            chain = [ast.If(test, [*taken, *case.body], chain)]
        assigned = ast.Assign([ast.Name(name, ast.Store())], node.subject)
        return [_like(node, statement) for statement in (assigned, *chain)]

    def _test_of(self, name: str, pattern: ast.pattern) -> tuple[ast.expr, list[ast.stmt]]:
        """Returns whether a pattern fits, and what it assigns."""
        subject = ast.Name(name, ast.Load())
        match pattern:
            case ast.MatchValue(value):
                return ast.Compare(subject, [ast.Eq()], [value]), []
            case ast.MatchSingleton(value):
                return ast.Compare(subject, [ast.Is()], [ast.Constant(value)]), []
            case ast.MatchAs(None, None):
                return ast.Constant(True), []
            case ast.MatchAs(None, str() as taken):
                assigned = ast.Assign([ast.Name(taken, ast.Store())], subject)
                return ast.Constant(True), [assigned]
            case ast.MatchOr(patterns):
                parts = [self._test_of(name, part) for part in patterns]
                if not any(taken for _, taken in parts):
                    return ast.BoolOp(ast.Or(), [test for test, _ in parts]), []
        raise NotImplementedError("`match` has a pattern that is not a value, a name or `_`")

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        return self._without_assignments(node, node.values)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        return self._without_assignments(node, [node.body, node.orelse])

    def visit_Compare(self, node: ast.Compare) -> Any:
        return self._without_assignments(node, node.comparators if len(node.ops) > 1 else [])

    def _without_assignments(self, node: ast.expr, parts: Sequence[ast.expr]) -> ast.expr:
        """Refuses `:=` in what becomes a function of its own."""
        for part in parts:
            if any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(part)):
                raise NotImplementedError("`:=` is in a part of `and`, `or`, `if` or a comparison")
        self.generic_visit(node)
        return node

    def _without_else(self, node: ast.For | ast.While) -> Any:
        if not node.orelse:
            return node
        rest, node.orelse = node.orelse, []
        name = f"broke_{next(self._numbers)}"
        _Noted(name).visit_all(node.body)
        start, ended = ast.Name(name, ast.Store()), ast.Name(name, ast.Load())
        begin = ast.Assign([start], ast.Constant(False))
        after = ast.If(ast.UnaryOp(ast.Not(), ended), rest, [])
        return [_like(node, begin), node, _like(node, after)]


class _Noted(ast.NodeTransformer):
    """Sets a variable before each `break` of a loop."""

    def __init__(self, name: str) -> None:
        self._name = name

    def visit_all(self, body: list[ast.stmt]) -> None:
        """Visits the statements of the loop."""
        block = ast.Module(body, [])
        self.generic_visit(block)
        body[:] = block.body

    def visit(self, node: ast.AST) -> Any:
        """Visits a node, unless `break` means something else in it."""
        if isinstance(node, (ast.For, ast.While, *_SCOPES)):
            return node
        return super().visit(node)

    def visit_Break(self, node: ast.Break) -> Any:
        noted = ast.Assign([ast.Name(self._name, ast.Store())], ast.Constant(True))
        return [_like(node, noted), node]


def _like(node: ast.AST, new: Any) -> Any:
    """Gives a new node the place of an old one in the user's code."""
    from malt.pyct import origin_info

    origin_info.copy_origin(node, new)
    return ast.fix_missing_locations(ast.copy_location(new, node))
