"""The passes of AutoGraph: a syntax tree becomes one whose control flow calls functions.

Most are those of diastatic-malt. Importing this module imports malt.
"""

import ast
import builtins
import inspect
import types
from collections.abc import Callable
from typing import Any, final

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

from distributary.tensorflow.autograph._syntax import Simplified

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
        private = _private_lists(node, context.info.namespace)
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
        node = _ControlFlow(context, private).visit(node)
        node = conditional_expressions.transform(node, context)
        node = logical_expressions.transform(node, context)
        return variables.transform(node, context)


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
    lists, uses, allowed = set[str](), list[ast.Name](), set[ast.AST]()
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
                lists.add(name.id)
                allowed.add(name)
            case ast.Subscript(value=name) | ast.For(iter=name) | ast.AugAssign(target=name):
                allowed.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name() as name)) if name.id in lists:
                allowed.add(name)
            case ast.Call(func=function):
                called = _value_of(function, namespace)
                is_reader = any(called is reader for reader in _READERS)
                if is_reader or getattr(called, "__module__", None) in _OPERATIONS:
                    allowed.update(part.args)
    wrong = {name.id for name in uses if name not in allowed or name in outlive}
    return frozenset(lists - wrong)


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


class _ControlFlow(control_flow.ControlFlowTransformer):
    """Also takes variables of outer functions out of blocks, whatever comes after them.

    Args:
        context: The context of malt.
        private: The variables whose lists nothing else refers to.
    """

    def __init__(self, context: Any, private: frozenset[str]) -> None:
        super().__init__(context)
        self._private = private

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
        result = super().visit_If(node)
        dead = self._private.intersection(map(str, used - live))
        names = ast.Tuple([*map(ast.Constant, sorted(dead))], ast.Load())
        result[-1].value.keywords.append(ast.keyword("dead", names))
        return result

    def _declared(self) -> Any:
        scope = self.state[control_flow._Function].scope
        return frozenset(scope.nonlocals | scope.globals)


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
