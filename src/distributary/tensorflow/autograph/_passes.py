"""The passes of AutoGraph: a syntax tree becomes one whose control flow calls functions.

Most are those of diastatic-malt. Importing this module imports malt.
"""

import ast
import builtins
import copy
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, final

import jax
from malt.converters import (
    break_statements,
    call_trees,
    conditional_expressions,
    continue_statements,
    control_flow,
    directives,
    functions,
    logical_expressions,
    return_statements,
    variables,
)
from malt.core import converter, unsupported_features_checker
from malt.lang import directives as lang
from malt.pyct import anno, cfg, origin_info, qual_names, templates
from malt.pyct.static_analysis import activity, liveness, reaching_definitions, reaching_fndefs
from malt.pyct.static_analysis.annos import NodeAnno
from malt.pyct.transpiler import GenericTranspiler

# Statements that diastatic-malt does not know, rewritten with those that it knows.
#
# for x in xs:                       broke_1 = False
# if x > 2:                      for x in xs:
# break                          if x > 2:
# else:                ->                    broke_1 = True
# x = 0                                  break
# if not broke_1:
# x = 0

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@final
class Simplified(ast.NodeTransformer):
    """Rewrites what malt does not know, or takes wrongly.

    These are `except`, `else` of `try` and of loops, `match`, annotations, and `:=` in `while`.

    Raises:
        NotImplementedError: for what stays unknown.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._fields: set[int] = set()  # by id, annotations that classes keep

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        self._fields.update(map(id, node.body))
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        self.generic_visit(node)
        if id(node) in self._fields:
            return node
        # Of a block's variable, Python refuses the annotation: the block declares it nonlocal.
        plain = ast.Pass() if node.value is None else ast.Assign([node.target], node.value)
        return _like(node, plain)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> Any:
        self.generic_visit(node)
        handled = ast.Attribute(ast.Name("ag__", ast.Load()), "handled", ast.Load())
        begin: Any = ast.Expr(ast.Call(handled, [], []))
        if node.name is not None:  # malt does not know that this assigns a variable
            begin = ast.Assign([ast.Name(node.name, ast.Store())], begin.value)
            node.name = None
        node.body.insert(0, _like(node, begin))
        return node

    def visit_Try(self, node: ast.Try) -> Any:
        self.generic_visit(node)
        if not node.orelse:
            return node
        rest, final, node.orelse, node.finalbody = node.orelse, node.finalbody, [], []
        begin, note, has_ended = self._flag(node, "tried")
        node.body.append(note)
        parts = [begin, node, _like(node, ast.If(has_ended, rest, []))]
        return [_like(node, ast.Try(parts, [], [], final))] if final else parts

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
        begin, note, has_ended = self._flag(node, "broke")
        _Noted(note).visit_all(node.body)
        after = ast.If(ast.UnaryOp(ast.Not(), has_ended), rest, [])
        return [begin, node, _like(node, after)]

    def _flag(self, node: ast.stmt, name: str) -> tuple[ast.stmt, ast.stmt, ast.expr]:
        """Returns what begins as False, what makes it True, and what reads it."""
        name = f"{name}_{next(self._numbers)}"
        begin, note = (
            _like(node, ast.Assign([ast.Name(name, ast.Store())], ast.Constant(value)))
            for value in (False, True)
        )
        return begin, note, ast.Name(name, ast.Load())


class _Noted(ast.NodeTransformer):
    """Puts a statement before each `break` of a loop."""

    def __init__(self, statement: ast.stmt) -> None:
        self._statement = statement

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
        return [_like(node, copy.deepcopy(self._statement)), node]


def _like(node: ast.AST, new: Any) -> Any:
    """Gives a new node the place of an old one in the user's code."""
    origin_info.copy_origin(node, new)
    return ast.fix_missing_locations(ast.copy_location(new, node))


# The passes

_STATIC = anno.Static


@final
class Transpiler(GenericTranspiler):
    """Rewrites the syntax trees of functions.

    Args:
        loop_options: The function that sets options of a loop.
    """

    def __init__(self, loop_options: Callable[..., Any]) -> None:
        self._loop_options = loop_options

    def get_transformed_name(self, node: Any) -> str:
        """Returns the name of a converted function."""
        return f"ag__{super().get_transformed_name(node)}"

    def transform_ast(self, node: Any, context: Any) -> Any:
        """Returns the rewritten tree of a function."""
        options = converter.ConversionOptions(optional_features=converter.Feature.BUILTIN_FUNCTIONS)
        context.user = converter.ProgramContext(options)
        node = Simplified().visit(node)
        private, own = _private_lists(node, context.info.namespace)
        parts = [n for n in ast.walk(node) if isinstance(n, (ast.Lambda, ast.GeneratorExp))]
        captured = frozenset().union(*map(_free_in, parts))
        written = _nonlocals_in(node)
        unsupported_features_checker.verify(node)
        graphs = cfg.build(node)
        node = activity.resolve(qual_names.resolve(node), context, None)
        node = reaching_definitions.resolve(node, context, graphs)
        anno.dup(node, {_STATIC.DEFINITIONS: _STATIC.ORIG_DEFINITIONS})
        kinds = {type(part) for part in ast.walk(node)}  # only passes with something to do run
        node = _Functions(context).visit(node)
        node = _Directives(context, self._loop_options).visit(node)
        if ast.Break in kinds:
            node = break_statements.transform(node, context)
        node = _Statements().visit(node)
        if kinds & {ast.Break, ast.Continue}:  # the pass before makes `continue` of `break`
            node = continue_statements.transform(node, context)
        node = return_statements.transform(node, context)
        node = call_trees.transform(node, context)
        graphs = cfg.build(node)
        node = activity.resolve(qual_names.resolve(node), context, None)
        node = reaching_definitions.resolve(node, context, graphs)
        node = reaching_fndefs.resolve(node, context, graphs)
        node = liveness.resolve(node, context, graphs)
        node = _ControlFlow(context, private, own, captured, written).visit(node)
        node = _Conditionals(context).visit(node)
        node = logical_expressions.transform(node, context)
        return variables.transform(node, context)


def _nonlocals_in(root: ast.AST) -> frozenset[str]:
    """Returns the variables that functions in a function or statement assign as `nonlocal`."""
    declared = (part.names for part in ast.walk(root) if isinstance(part, ast.Nonlocal))
    return frozenset(itertools.chain.from_iterable(declared))


def _free_in(node: ast.AST) -> frozenset[str]:
    """Returns the variables of an expression that are not parameters or targets inside it."""
    if isinstance(node, ast.Name):
        return frozenset({node.id})
    names = frozenset[str]().union(*map(_free_in, ast.iter_child_nodes(node)))
    own: list[ast.AST] = []
    if isinstance(node, ast.Lambda):
        own = [part for part in ast.walk(node.args) if isinstance(part, ast.arg)]
    elif isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)):
        own = [part for one in node.generators for part in ast.walk(one.target)]
    return names - {getattr(part, "arg", getattr(part, "id", None)) for part in own}


def _value_of(node: ast.expr, namespace: dict[str, Any]) -> Any:
    """Returns what a name or a name of a module stands for; None if it is not known."""
    if isinstance(node, ast.Name):
        return namespace.get(node.id, getattr(builtins, node.id, None))
    if isinstance(node, ast.Attribute):
        of = _value_of(node.value, namespace)
        return getattr(of, node.attr, None) if inspect.ismodule(of) else None
    return None


_MADE = (ast.List, ast.ListComp, ast.Dict, ast.DictComp)
_MAKERS = {*map(id, (dict, list, sorted))}
_MAPS = {*map(id, (jax.tree.map, jax.tree_util.tree_map))}
# Functions, and modules of functions, that only read the lists among their arguments.
_READERS = {*map(id, (all, any, dict, len, list, max, min, sorted, sum, tuple))}
_OPERATIONS = ("jax.numpy", "numpy", "distributary.tensorflow._operations", "keras.src.ops.numpy")
_ITERATORS = {*map(id, (enumerate, filter, map, reversed, zip))}
_VIEWS = ("items", "keys", "values")
# What statements and expressions only read, by the names of their fields.
_READ = {
    ast.AugAssign: ("target",),
    ast.Compare: ("left", "comparators"),
    ast.FormattedValue: ("value",),
    ast.If: ("test",),
    ast.IfExp: ("test",),
    ast.Starred: ("value",),
    ast.Subscript: ("value",),
    ast.While: ("test",),
    ast.comprehension: ("iter",),
}


def _private_lists(root: ast.AST, namespace: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Returns the variables whose lists or dicts nothing else refers to.

    The function makes them, and uses them only by methods and items, in loops and conditions, after
    stars, as arguments of functions that do not keep them, and as its result.

    Returns:
        The variables, and those of them that no function inside the function uses.
    """
    parts = [*ast.walk(root)]
    inner = [part for part in parts if isinstance(part, _SCOPES) and part is not root]
    nested = {node for part in inner for node in ast.walk(part)}
    used_in = {node.id for node in nested if isinstance(node, ast.Name)}
    named = {getattr(part, kind, "") for part in parts for kind in ("arg", "name", "asname")}
    namespace = namespace | dict.fromkeys(named | _stored_in(root))  # not builtins or globals
    made = [pair for part in parts for pair in _made(part, namespace)]
    results = (_results(part, used_in) for part in parts if part not in nested)
    read = {node for part in parts for node in _read(part, namespace)}
    read |= {*itertools.chain.from_iterable(results), *(name for name, _ in made)}
    late = {*filter(lambda part: isinstance(part, ast.GeneratorExp), parts)} - read
    if any(isinstance(node, (ast.AsyncFunctionDef, ast.Yield, ast.YieldFrom)) for node in nested):
        late |= nested
    outlive = {node for part in late for node in ast.walk(part)}
    private = {name.id for name, _ in made if isinstance(name.ctx, ast.Store)} - {
        *itertools.chain.from_iterable(map(_outer_names, parts)),
        *(part.id for part in parts if isinstance(part, ast.Name) and part not in read - outlive),
    }

    def is_list(node: ast.expr) -> bool:
        sources = _sources(node, namespace)
        return getattr(node, "id", None) in private or (
            sources is not None and all(map(is_list, sources))
        )

    while more := {name.id for name, of in made if not all(map(is_list, of))} & private:
        private -= more
    return private, private - used_in


def _outer_names(node: ast.AST) -> Sequence[str]:
    """Returns the variables of a statement whose lists may come from elsewhere."""
    match node:
        case ast.FunctionDef(args=of) | ast.AsyncFunctionDef(args=of):
            return [arg.arg for arg in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
        case ast.Global(names) | ast.Nonlocal(names):
            return names
    return ()


def _results(node: ast.AST, used_in: set[str]) -> Sequence[ast.Name]:
    """Returns the variables that `return` hands out, each once, and to nobody else."""
    match node:
        case ast.Return(ast.Name() | ast.Tuple() as value):
            found = [n for n in getattr(value, "elts", [value]) if isinstance(n, ast.Name)]
            ids = {name.id for name in found}
            if len(ids) == len(found) and not ids & used_in:
                return found
    return ()


def _made(
    node: ast.AST, namespace: dict[str, Any]
) -> Iterator[tuple[ast.Name, Sequence[ast.expr]]]:
    """Yields variables of which a new list is made, or which get one, each with its sources."""
    match node:
        case ast.Assign([target], value):
            for name, of in _pairs(target, value):
                if (sources := _sources(of, namespace)) is not None:
                    yield name, sources
        case ast.AugAssign(ast.Name() as to, _, ast.Name() as name) | ast.Call(
            ast.Attribute(ast.Name() as to, "extend" | "update"), [ast.Name() as name]
        ):
            yield name, [to]
        case ast.Call() | ast.BinOp():
            sources = _sources(node, namespace) or []
            yield from ((name, sources) for name in sources if isinstance(name, ast.Name))


def _stored_in(node: ast.AST) -> set[str]:
    """Returns the variables that code assigns."""
    names = (part for part in ast.walk(node) if isinstance(part, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.Name, ast.expr]]:
    """Yields the variables of an assignment, each with what it becomes."""
    match target, value:
        case ast.Name(), _:
            yield target, value
        case ast.Tuple(targets), ast.Tuple(values) if len(targets) == len(values):
            if not any(isinstance(of, ast.Starred) for of in (*targets, *values)):
                for pair in zip(targets, values, strict=True):
                    yield from _pairs(*pair)


def _sources(node: ast.AST, namespace: dict[str, Any]) -> list[ast.expr] | None:
    """Returns what is to be a list or dict so that an expression makes a new one; None if none."""
    match node:
        case ast.BinOp(left, ast.Add(), right):
            return [left, right]
        case ast.BinOp(left, ast.Mult()):
            return [left]
        case ast.Subscript(of, ast.Slice()) | ast.Call(ast.Attribute(of, "copy"), []):
            return [of]
        case ast.Call(function, args):
            called = _value_of(function, namespace)
            if id(called) in _MAPS and len(args) > 1 and not node.keywords:
                return [args[1]]
            return [] if id(called) in _MAKERS else None
    return [] if isinstance(node, _MADE) else None


def _read(node: ast.AST, namespace: dict[str, Any]) -> Iterator[ast.AST]:
    """Yields what a statement or expression reads, and does not keep."""
    read: list[ast.AST] = []
    for field in _READ.get(type(node), ()):
        of = getattr(node, field)
        read += of if isinstance(of, list) else [of]
    match node:
        case ast.For(iter=of):
            written = _stored_in(node)  # what the loop reads is another list than the variable
            if not any(getattr(part, "id", None) in written for part in ast.walk(of)):
                read = [of]
        case ast.Dict(keys, values):  # the items of `**values` are copied
            read = [v for k, v in zip(keys, values, strict=True) if k is None]
        case ast.UnaryOp(ast.Not(), of) | ast.keyword(None, of):
            read = [of]
        case ast.Call(function, args):
            called = _value_of(function, namespace)
            if getattr(called, "__module__", None) in _OPERATIONS or called is print:
                read = [*args]
            elif id(called) in _READERS and (len(args) == 1 or called is sum):
                read = [*args[:1]]
            elif isinstance(function, ast.Attribute) and function.attr not in _VIEWS:
                read = [] if function.attr.startswith("_") else [function.value]
    while read:
        first = read.pop()
        match first:
            case ast.Call(ast.Attribute(viewed, method)) if method in _VIEWS:
                yield viewed
            case ast.Call(function, args) if id(_value_of(function, namespace)) in _ITERATORS:
                read += args
            case ast.BoolOp(_, values):
                read += values
            case _:
                yield first


class _Functions(functions.FunctionTransformer):
    def _function_scope_options(self, fn_scope: Any) -> Any:
        # Options of a function, which are the same for all.
        return types.SimpleNamespace(to_ast=lambda: ast.Constant(None))


class _Directives(directives.DirectivesTransformer):
    """Knows `set_loop_options`."""

    def __init__(self, context: Any, loop_options: object) -> None:
        super().__init__(context)
        self._loop_options = loop_options

    def visit_Expr(self, node: Any) -> Any:  # noqa: N802
        result = super().visit_Expr(node)
        called = getattr(getattr(result, "value", None), "func", None)
        known = called and anno.getanno(called, directives.STATIC_VALUE, default=None)
        if known is not self._loop_options:
            return result
        self._process_statement_directive(result.value, lang.set_loop_options)
        return None


class _Conditionals(conditional_expressions.ConditionalExpressionTransformer):
    """Also converts `a if b else c` inside of another one."""

    def visit_IfExp(self, node: Any) -> Any:  # noqa: N802
        return super().visit_IfExp(self.generic_visit(node))


class _ControlFlow(control_flow.ControlFlowTransformer):
    """Also takes variables of outer functions and of lambdas out of blocks, whatever comes later.

    Args:
        context: The context of malt.
        private: The variables whose lists nothing else refers to.
        own: Those of them that no function inside the function uses.
        captured: The variables that lambdas and generators read.
        written: The variables that functions in the function assign as `nonlocal`.
    """

    def __init__(
        self,
        context: Any,
        private: Set[str],
        own: Set[str],
        captured: frozenset[str],
        written: frozenset[str],
    ) -> None:
        super().__init__(context)
        self._private = private
        self._own = own
        self._captured = captured | written
        self._written = written

    def _get_block_basic_vars(self, modified: Any, live_in: Any, live_out: Any) -> Any:
        kept = {v for v in modified if self._is_kept(v)}
        return super()._get_block_basic_vars(modified, live_in, live_out) | kept

    def _get_block_composite_vars(self, modified: Any, live_in: Any) -> Any:
        # Not items and attributes: `values[k]` is another one after `k = 2`, and a property sets
        # more than it reads. `Reached` carries what changes in the objects themselves.
        return frozenset()

    def _get_block_vars(self, node: Any, modified: Any) -> Any:
        written = self._written & _nonlocals_in(node)
        modified = modified | {qual_names.QN(name) for name in written}
        names, undefined, num_outs = super()._get_block_vars(node, modified)
        outs = [v for k, v in enumerate(names) if k < num_outs or self._is_kept(v)]
        return outs + [v for v in names if v not in outs], undefined, len(outs)

    def visit_If(self, node: Any) -> Any:  # noqa: N802
        live = anno.getanno(node, _STATIC.LIVE_VARS_OUT)
        scopes = [anno.getanno(node, k) for k in (NodeAnno.BODY_SCOPE, NodeAnno.ORELSE_SCOPE)]
        used = scopes[0].referenced | scopes[1].referenced
        result = super().visit_If(node)
        dead = self._own & set(map(str, used - live))
        return self._with_names(self._with_names(result, "dead", dead), "private", self._private)

    def visit_For(self, node: ast.For) -> Any:  # noqa: N802
        return self._with_names(super().visit_For(node), "private", self._private)

    def visit_While(self, node: ast.While) -> Any:  # noqa: N802
        ended = None
        match node.test:  # of a loop that only `return` ends
            case ast.BoolOp(ast.And(), [ast.UnaryOp(ast.Not(), ast.Name(name)), test]):
                if isinstance(test, ast.Constant) and test.value:
                    ended = name
        result = super().visit_While(node)
        result[-1].value.keywords.append(ast.keyword("ended", ast.Constant(ended)))
        return self._with_names(result, "private", self._private)

    @staticmethod
    def _with_names(result: Any, keyword: str, names: Set[str]) -> Any:
        """Passes names of variables to the function for a statement."""
        value = ast.Tuple([*map(ast.Constant, sorted(names))], ast.Load())
        result[-1].value.keywords.append(ast.keyword(keyword, value))
        return result

    def _is_kept(self, variable: Any) -> bool:
        """Returns whether something outside of the blocks may read a variable at any time."""
        scope = self.state[control_flow._Function].scope
        return variable in scope.nonlocals | scope.globals or str(variable) in self._captured


@final
class _Statements(ast.NodeTransformer):
    """Rewrites `assert`, `with`, `in` and `raise`.

    malt's own pass for `assert` takes constant messages only.
    """

    def visit_Assert(self, node: ast.Assert) -> Any:
        # Values that the message shows are taken out of it, because they may not be known yet.
        self.generic_visit(node)
        message = node.msg or ast.Constant("")
        values: list[ast.expr] = []
        if isinstance(message, ast.JoinedStr):
            parts = [part for part in message.values if isinstance(part, ast.FormattedValue)]
            values = [part.value for part in parts]
            for k, part in enumerate(parts):
                part.value = ast.Name(f"value_{k}", ast.Load())
        elif not isinstance(message, ast.Constant):
            values, message = [message], ast.Name("value_0", ast.Load())
        names = [ast.arg(f"value_{k}") for k in range(len(values))]
        shown = ast.Lambda(ast.arguments([], names, None, [], [], None, []), message)
        return self._parsed(
            "ag__.assert_stmt(test, lambda: values, shown)",
            node,
            test=node.test,
            values=ast.Tuple(values, ast.Load()),
            shown=shown,
        )

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        for item in node.items:
            (made,) = self._parsed("ag__.Context(manager)", node, manager=item.context_expr)
            item.context_expr = made.value
        return node

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        match node:
            case ast.Compare(item, [ast.In() | ast.NotIn() as how], [values]):
                template = "ag__.contains(values, item)"
                if isinstance(how, ast.NotIn):
                    template = f"ag__.not_({template})"
                (statement,) = self._parsed(template, node, item=item, values=values)
                return statement.value
        return node

    def visit_Raise(self, node: ast.Raise) -> Any:
        self.generic_visit(node)
        if node.exc is not None:
            (statement,) = self._parsed("ag__.raised(error)", node, error=node.exc)
            node.exc = statement.value
        return node

    @staticmethod
    def _parsed(template: str, node: ast.AST, **parts: Any) -> Any:
        nodes = templates.replace(template, **parts)
        origin_info.copy_origin(node, nodes)
        return nodes
