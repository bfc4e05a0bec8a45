"""The passes of AutoGraph: a syntax tree becomes one whose control flow calls functions.

The rewriting of statements is that of diastatic-malt. Its analyses and its rewriting of expressions
take most of the time of a conversion, so they are written here for what the passes ask of them.
Importing this module imports malt.
"""

import ast
import builtins
import inspect
from collections.abc import Callable
from typing import Any, final

from malt.converters import (
    break_statements,
    call_trees,
    continue_statements,
    control_flow,
    directives,
    functions,
    return_statements,
)
from malt.core import unsupported_features_checker
from malt.lang import directives as lang
from malt.pyct import anno, cfg, origin_info, parser, qual_names, templates
from malt.pyct.static_analysis import activity, liveness, reaching_definitions, reaching_fndefs
from malt.pyct.static_analysis.annos import NodeAnno
from malt.pyct.transpiler import GenericTranspiler

from distributary.tensorflow.autograph._syntax import Simplified

_STATIC, _ORIGIN = anno.Static, anno.Basic.ORIGIN
_FLOW = (ast.If, ast.For, ast.While)


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
        node = Simplified().visit(node)
        private = _private_lists(node, context.info.namespace)
        unsupported_features_checker.verify(node)
        if isinstance(node, ast.FunctionDef):
            _Names().visit(node)
        _reserve_names(node, context)
        kinds = {type(part) for part in ast.walk(node)}  # only passes with something to do run
        if self._has_options(node, context.info.namespace):
            graphs = cfg.build(node)
            node = activity.resolve(qual_names.resolve(node), context, None)
            node = reaching_definitions.resolve(node, context, graphs)
            node = _Directives(context, self._loop_options).visit(node)
        node = _Functions(context).visit(_with_scopes(node))
        if ast.Break in kinds:
            node = break_statements.BreakTransformer(context).visit(_with_scopes(node))
        node = _Statements().visit(node)
        if kinds & {ast.Break, ast.Continue}:  # the pass before makes `continue` of `break`
            rewriter = continue_statements.ContinueCanonicalizationTransformer(context)
            node = rewriter.visit(_with_scopes(node))
        if _returns_early(node):
            node = return_statements.ConditionalReturnRewriter(context).visit(node)
            rewriter = return_statements.ReturnStatementsTransformer(context, True)
            node = rewriter.visit(_with_scopes(node))
        node = _Calls(context).visit(qual_names.resolve(node))
        if any(isinstance(part, _FLOW) for part in ast.walk(node)):
            graphs = cfg.build(node)
            node = _Activity(context).visit(qual_names.resolve(node))
            _note_variables(node, context, graphs)
            node = _ControlFlow(context, private).visit(node)
        return _Expressions().visit(node)

    def _has_options(self, root: ast.AST, namespace: dict[str, Any]) -> bool:
        """Returns whether a statement calls a function that says something about a loop."""
        known = (self._loop_options, lang.set_loop_options, lang.set_element_type)
        return any(
            isinstance(part, ast.Expr)
            and isinstance(part.value, ast.Call)
            and any(_value_of(part.value.func, namespace) is one for one in known)
            for part in ast.walk(root)
        )


def _value_of(node: ast.expr, namespace: dict[str, Any]) -> Any:
    """Returns what a name or a name of a module stands for; None if it is not known."""
    if isinstance(node, ast.Name):
        return namespace.get(node.id, getattr(builtins, node.id, None))
    if isinstance(node, ast.Attribute):
        of = _value_of(node.value, namespace)
        return getattr(of, node.attr, None) if inspect.ismodule(of) else None
    return None


# Functions, and modules of functions, that only read the lists among their arguments.
_READERS = (all, any, len, list, max, min, print, sorted, sum, tuple)
_OPERATIONS = ("jax.numpy", "numpy", "distributary.tensorflow._operations")


def _private_lists(root: ast.AST, namespace: dict[str, Any]) -> frozenset[str]:
    """Returns the variables whose lists nothing else refers to.

    The function makes the lists, and uses them only by methods and items, in loops, and as
    arguments of functions that do not keep them.
    """
    made, uses, allowed = set[str](), list[ast.Name](), set[ast.AST]()
    inner = (ast.FunctionDef, ast.Lambda, ast.GeneratorExp)
    outlive = {
        name
        for part in ast.walk(root)
        if isinstance(part, inner) and part is not root
        for name in ast.walk(part)
    }
    for part in ast.walk(root):
        match part:
            case ast.Name():
                uses.append(part)
            case ast.Assign(targets=[ast.Name() as name], value=ast.List()):
                made.add(name.id)
                allowed.add(name)
            case ast.Subscript(value=name) | ast.For(iter=name) | ast.AugAssign(target=name):
                allowed.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name() as name)) if name.id in made:
                allowed.add(name)
            case ast.Call(func=function):
                called = _value_of(function, namespace)
                is_reader = any(called is reader for reader in _READERS)
                if is_reader or getattr(called, "__module__", None) in _OPERATIONS:
                    allowed.update(part.args)
    wrong = {name.id for name in uses if name not in allowed or name in outlive}
    return frozenset(made - wrong)


class _Names(ast.NodeVisitor):
    """Marks the names of the user: reading one of them looks whether it has a value."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (node.args, *node.body):
            self.visit(part)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        for part in node.body:
            self.visit(part)

    def visit_arg(self, node: ast.arg) -> None:
        """Leaves out annotations."""

    def visit_Name(self, node: ast.Name) -> None:
        anno.setanno(node, _STATIC.ORIG_DEFINITIONS, ())


def _reserve_names(root: ast.AST, context: Any) -> None:
    """Keeps the names of a function from being given to what malt adds to it."""
    for node in ast.walk(root):
        for field in ("id", "arg", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                context.namer.generated_names.add(name)


class _NoScope:
    """Stands for the scopes that malt asks for names, which `_reserve_names` has reserved."""

    referenced: frozenset[Any] = frozenset()


def _with_scopes(root: ast.AST) -> ast.AST:
    for node in ast.walk(root):
        if isinstance(node, (ast.For, ast.While, ast.FunctionDef)):
            anno.setanno(node, NodeAnno.BODY_SCOPE, _NoScope)
        elif isinstance(node, ast.Lambda):
            anno.setanno(node, _STATIC.SCOPE, _NoScope)
    return root


class _Options:
    """Stands for the options of a function, which are the same for all."""

    @staticmethod
    def to_ast() -> ast.expr:
        return ast.Constant(None)


class _Functions(functions.FunctionTransformer):
    def _function_scope_options(self, fn_scope: Any) -> Any:
        return _Options


class _Directives(directives.DirectivesTransformer):
    """Knows `set_loop_options`."""

    def __init__(self, context: Any, loop_options: object) -> None:
        super().__init__(context)
        self._loop_options = loop_options

    def visit_Expr(self, node: Any) -> Any:  # noqa: N802
        made = super().visit_Expr(node)
        called = getattr(getattr(made, "value", None), "func", None)
        known = called and anno.getanno(called, directives.STATIC_VALUE, default=None)
        if known is not self._loop_options:
            return made
        self._process_statement_directive(made.value, lang.set_loop_options)
        return None


class _Calls(call_trees.CallTreeTransformer):
    """Makes the nodes of a call without a template, which would copy its arguments."""

    def visit_Call(self, node: Any) -> Any:  # noqa: N802
        name = str(anno.getanno(node.func, anno.Basic.QN, default=""))
        if name in ("pdb.set_trace", "ipdb.set_trace", "breakpoint"):
            return super().visit_Call(node)
        scope = self.state[call_trees._Function].context_name
        node = self.generic_visit(node)
        if name.startswith(("ag__.", f"{scope}.")):
            return node
        keywords: ast.expr = ast.Constant(None)
        if node.keywords:
            keywords = ast.Call(ast.Name("dict", _LOAD), [], node.keywords)
        positional = self._args_to_tuple(node)
        return _called("converted_call", node.func, positional, keywords, ast.Name(scope, _LOAD))


_LOAD = ast.Load()


def _called(name: str, *arguments: ast.expr) -> ast.Call:
    """Returns a call of a function of `ag__`."""
    function = ast.Attribute(ast.Name("ag__", _LOAD), name, _LOAD)
    return ast.Call(function, list(arguments), [])


class _Activity(activity.ActivityAnalyzer):
    def _process_parallel_blocks(self, parent: Any, children: Any) -> Any:
        # malt copies the scopes of each block to merge them again. Blocks only add to them.
        for child, name in children:
            parent = self._process_block_node(parent, child, name)
        return parent


class _Defined(cfg.GraphVisitor):
    """Finds the variables that may have a value after each statement."""

    def init_state(self, node: Any) -> frozenset[Any]:
        return frozenset()

    def visit_node(self, node: Any) -> bool:
        before = self.out[node]
        self.in_[node] = defined = frozenset().union(*(self.out[one] for one in node.prev))
        scope = anno.getanno(node.ast_node, _STATIC.SCOPE, default=None)
        if scope is not None:
            made = (scope.bound | scope.globals) - scope.deleted
            defined = made.union(scope.params, defined - scope.modified - scope.deleted)
        self.out[node] = frozenset(defined)
        return bool(before != self.out[node])


def _note_variables(root: ast.AST, context: Any, graphs: Any) -> None:
    """Notes for each `if` and loop which variables have a value, and which are used after it."""
    if sum(isinstance(function, ast.FunctionDef) for function in graphs) > 1:
        reaching_fndefs.resolve(root, context, graphs)
    else:
        for graph in graphs.values():
            for node in graph.index:
                anno.setanno(node, _STATIC.DEFINED_FNS_IN, ())
    for function, graph in graphs.items():
        if isinstance(function, ast.Lambda):
            continue
        defined, live = _Defined(graph), liveness.Analyzer(graph, include_annotations=True)
        defined.visit_forward()
        live.visit_reverse()
        union = lambda state, nodes: frozenset().union(*(state[node] for node in nodes))
        for node in graph.stmt_next:
            if isinstance(node, _FLOW):
                entry = graph.index[node.iter if isinstance(node, ast.For) else node.test]
                before = union(defined.out, graph.stmt_prev[node])
                anno.setanno(node, _STATIC.DEFINED_VARS_IN, before)
                anno.setanno(node, _STATIC.LIVE_VARS_IN, frozenset(live.in_[entry]))
                after = union(live.in_, graph.stmt_next[node])
                anno.setanno(node, _STATIC.LIVE_VARS_OUT, after)


class _ControlFlow(control_flow.ControlFlowTransformer):
    """Also takes variables of outer functions out of blocks, whatever comes after them.

    Args:
        context: The context of malt.
        private: The variables whose lists nothing else refers to.
    """

    def __init__(self, context: Any, private: frozenset[str]) -> None:
        super().__init__(context)
        self._private = private

    def generic_visit(self, node: Any) -> Any:
        return node if isinstance(node, ast.expr) else super().generic_visit(node)

    def visit_Lambda(self, node: Any) -> Any:  # noqa: N802
        return node

    def _get_block_basic_vars(self, modified: Any, live_in: Any, live_out: Any) -> Any:
        declared = self._declared() & modified
        return super()._get_block_basic_vars(modified, live_in, live_out) | declared

    def _get_block_vars(self, node: Any, modified: Any) -> Any:
        names, undefined, num_outs = super()._get_block_vars(node, modified)
        declared = self._declared()
        outs = [v for k, v in enumerate(names) if k < num_outs or v in declared]
        return outs + [v for v in names if v not in outs], undefined, len(outs)

    def visit_If(self, node: Any) -> Any:  # noqa: N802
        live = anno.getanno(node, _STATIC.LIVE_VARS_OUT)
        scopes = [anno.getanno(node, k) for k in (NodeAnno.BODY_SCOPE, NodeAnno.ORELSE_SCOPE)]
        used = scopes[0].referenced | scopes[1].referenced
        made = self._around_blocks(super().visit_If, node, "body", "orelse")
        dead = self._private.intersection(map(str, used - live))
        names = ast.Tuple([*map(ast.Constant, sorted(dead))], _LOAD)
        made[-1].value.keywords.append(ast.keyword("dead", names))
        return made

    def visit_For(self, node: Any) -> Any:  # noqa: N802
        return self._around_blocks(super().visit_For, node, "body")

    def visit_While(self, node: Any) -> Any:  # noqa: N802
        return self._around_blocks(super().visit_While, node, "body")

    def _around_blocks(self, visit: Callable[[Any], Any], node: Any, *fields: str) -> Any:
        """Lets malt make the functions of blocks, without a copy of what stands in them."""
        node = self.generic_visit(node)
        blocks = [getattr(node, field) or [ast.Pass()] for field in fields]
        for field in fields:
            setattr(node, field, [ast.Pass()])
        made = visit(node)
        for function, block in zip(made[2:], blocks, strict=False):  # two are for the variables
            function.body[-1:] = block
        return made

    def _declared(self) -> Any:
        scope = self.state[control_flow._Function].scope
        return frozenset(scope.nonlocals | scope.globals)


@final
class _Expressions(ast.NodeTransformer):
    """Rewrites the reading of variables, `if` in expressions, `and`, `or`, `not` and `a < b < c`.

    These are three passes of malt in one.
    """

    def visit_Name(self, node: ast.Name) -> Any:
        if not isinstance(node.ctx, ast.Load) or not anno.hasanno(node, _STATIC.ORIG_DEFINITIONS):
            return node
        return _placed(node, _called("ld", node))

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        shown = ast.Constant(parser.unparse(node.test, include_encoding_marker=False).strip())
        self.generic_visit(node)
        branches = (_later(node.body), _later(node.orelse))
        return _placed(node, _called("if_exp", node.test, *branches, shown))

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        if len(node.ops) == 1:
            return node
        firsts = (node.left, *node.comparators)
        parts: list[ast.expr] = [
            ast.Compare(first, [how], [second])
            for first, how, second in zip(firsts, node.ops, node.comparators, strict=False)
        ]
        made = parts[0]
        for part in parts[1:]:
            made = _called("and_", _later(made), _later(part))
        return _placed(node, made)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return _placed(node, _called("not_", node.operand))

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        name = "and_" if isinstance(node.op, ast.And) else "or_"
        *firsts, made = node.values
        for value in reversed(firsts):
            made = _called(name, _later(value), _later(made))
        return _placed(node, made)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        name = node.target.id
        read = ast.Assign([ast.Name(name, ast.Store())], _called("ld", ast.Name(name, _LOAD)))
        return [_placed(node, read), node]

    def visit_Delete(self, node: ast.Delete) -> Any:
        self.generic_visit(node)
        made: list[ast.stmt] = []
        for target in node.targets:
            if isinstance(target, ast.Name):
                undefined = _called("Undefined", ast.Constant(target.id))
                made.append(ast.Assign([ast.Name(target.id, ast.Store())], undefined))
        rest = [target for target in node.targets if not isinstance(target, ast.Name)]
        if rest:
            made.append(ast.Delete(rest))
        return [_placed(node, statement) for statement in made]


def _later(value: ast.expr) -> ast.Lambda:
    """Returns a function of nothing that computes a value."""
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), value)


def _placed(node: ast.AST, made: object) -> Any:
    """Gives a new node the place of an old one in the user's code."""
    anno.copyanno(node, made, _ORIGIN)
    return made


def _returns_early(root: ast.AST) -> bool:
    """Returns whether a function has a `return` that is not its last statement."""
    last = {
        id(node.body[-1])
        for node in ast.walk(root)
        if isinstance(node, (ast.FunctionDef, ast.With)) and node.body
    }
    returns = [node for node in ast.walk(root) if isinstance(node, ast.Return)]
    return any(id(node) not in last for node in returns)


@final
class _Statements(ast.NodeTransformer):
    """Rewrites `assert` and `values.append(value)`, for lists that the function has as variables.

    malt's own pass for `assert` takes constant messages only, and its pass for lists rewrites
    every literal.
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

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        match node:
            case ast.Compare(item, [ast.In() | ast.NotIn() as how], [values]):
                template = "ag__.contains(values, item)"
                if isinstance(how, ast.NotIn):
                    template = f"ag__.not_({template})"
                (made,) = self._parsed(template, node, item=item, values=values)
                return made.value
        return node

    def visit_Raise(self, node: ast.Raise) -> Any:
        self.generic_visit(node)
        if node.exc is not None:
            (made,) = self._parsed("ag__.raised(error)", node, error=node.exc)
            node.exc = made.value
        return node

    @staticmethod
    def _parsed(template: str, node: ast.AST, **parts: Any) -> Any:
        made = templates.replace(template, **parts)
        origin_info.copy_origin(node, made)
        return made
