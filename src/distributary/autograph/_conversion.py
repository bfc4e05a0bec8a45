"""Functions, rewritten so that their control flow calls `_operators`.

diastatic-malt, which is TensorFlow's AutoGraph without TensorFlow, analyzes and rewrites the syntax
tree. The new code keeps the file and the lines of the old one, so tracebacks and debuggers show
what the user has written.
"""

import ast
import functools
import inspect
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, final

from distributary.autograph import _operators
from distributary.autograph._reached import is_of_library
from distributary.autograph._syntax import Simplified
from distributary.tracing import current_scope

_F = TypeVar("_F", bound=Callable[..., Any])

_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_NOT_PLAIN = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# Names that malt gives to the functions it makes of blocks.
_BLOCKS = ("if_body", "else_body", "loop_body", "loop_test", "extra_test", "get_state", "set_state")


def do_not_convert(func: _F = None) -> _F:  # type: ignore[assignment]
    """Marks a function as one that AutoGraph leaves as it is; use it as a decorator.

    Source: `tf.autograph.experimental.do_not_convert`.
    """
    if func is None:
        return do_not_convert
    _marked.add(getattr(func, "__func__", func))
    return func


def set_loop_options(
    parallel_iterations: int | None = None,
    swap_memory: bool | None = None,
    maximum_iterations: int | None = None,
    shape_invariants: Any = None,
) -> None:
    """Sets options of the loop whose first statement this is, if the loop is converted.

    Args:
        parallel_iterations: No effect.
        swap_memory: No effect.
        maximum_iterations: The most turns of a `while` loop. It is evaluated this many times then,
            and its gradients need no turn to be computed again.
        shape_invariants: No effect: shapes stay the same in all turns.

    Source: `tf.autograph.experimental.set_loop_options`.
    """


_marked: "weakref.WeakSet[Any]" = weakref.WeakSet()


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `function` with its control flow converted.

    So are the functions that it calls, apart from those of libraries. A function whose source
    cannot be had runs as it is.

    Args:
        function: A function, a method, or an object that can be called.
    """

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return converted_call(function, args, kwargs)

    return call


def converted_call(f: Any, args: tuple[Any, ...], kwargs: Any, scope: Any = None) -> Any:
    """Returns `f(*args, **kwargs)`; converted code calls everything so."""
    kwargs = kwargs or {}
    while isinstance(f, functools.partial):
        args, kwargs = (*f.args, *args), {**f.keywords, **kwargs}
        f = f.func
    overload = _operators.overload_of(f)
    if overload is not None:
        return overload(*args, **kwargs)
    if scope is not None and f in (super, eval, locals, globals):
        return _in_original_context(f, args, scope)
    function = f
    owner: tuple[Any, ...] = ()
    if isinstance(function, types.MethodType):
        owner, function = (function.__self__,), function.__func__
    elif not isinstance(function, (types.FunctionType, type)):
        call = inspect.getattr_static(type(function), "__call__", None)
        if isinstance(call, types.FunctionType):
            owner, function = (function,), call
    if is_convertible(function):
        return _convert(function)(*owner, *args, **kwargs)
    return f(*args, **kwargs)


def _in_original_context(f: Any, args: Any, scope: Any) -> Any:
    """Calls a builtin function that looks at the frame of its caller."""
    from malt.operators import py_builtins

    if f is super:
        return py_builtins.super_in_original_context(f, args, scope)
    if f is eval:
        return py_builtins.eval_in_original_context(f, args, scope)
    if f is locals:
        return py_builtins.locals_in_original_context(scope)
    return py_builtins.globals_in_original_context(scope)


def is_convertible(function: Any) -> bool:
    """Returns whether a function is code of the user, which can be rewritten."""
    if not isinstance(function, types.FunctionType):
        return False
    code = function.__code__
    return not (
        is_of_library(function.__module__)
        or hasattr(function, "autograph_info__")  # it is converted already
        or function in _marked
        or code.co_flags & _NOT_PLAIN
        or (code.co_filename.startswith(_STANDARD_LIBRARY) and "-packages" not in code.co_filename)
        or code.co_filename.startswith("<frozen")
    )


def _convert(function: types.FunctionType) -> Callable[..., Any]:
    """Returns the converted form of a function, or itself if malt cannot convert it."""
    code = function.__code__
    with _lock:
        if code not in _factories:
            _factories[code] = _Factory(function)
        factory = _factories[code]
    return factory.bound_to(function)


_lock = threading.RLock()
_factories: "weakref.WeakKeyDictionary[types.CodeType, _Factory]" = weakref.WeakKeyDictionary()


@final
class _Factory:
    """Makes the converted forms of all functions with one code object.

    Args:
        function: One of them.

    Attributes:
        reason: Why it cannot be converted; None if it can.
    """

    def __init__(self, function: types.FunctionType) -> None:
        self.reason: str | None = None
        try:
            self._code = _converted_code(function)
        except Exception as error:  # malt raises what comes, for syntax that it does not know
            self.reason = str(error).partition("\n")[0] or repr(error)

    def bound_to(self, function: types.FunctionType) -> Callable[..., Any]:
        """Returns the converted form, with the globals, closure and defaults of `function`."""
        if self.reason is not None:
            scope = current_scope()
            if scope is not None:
                scope.unconverted[function.__qualname__] = self.reason
            return function
        closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cells = tuple(
            types.CellType(_operators_of_malt()) if name == "ag__" else closure[name]
            for name in self._code.co_freevars
        )
        made = types.FunctionType(
            self._code, function.__globals__, function.__name__, function.__defaults__, cells
        )
        made.__kwdefaults__ = function.__kwdefaults__
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        return made


@functools.cache
def _operators_of_malt() -> types.ModuleType:
    """Returns the module that converted code knows as `ag__`."""
    from malt.core import converter
    from malt.operators import variables

    module = types.ModuleType("ag__")
    for name in _operators.__all__:
        setattr(module, name, getattr(_operators, name))
    for name in ("ld", "ldu", "Undefined", "UndefinedReturnValue"):
        setattr(module, name, getattr(variables, name))
    for name, value in {
        "STD": converter.STANDARD_OPTIONS,
        "ConversionOptions": converter.ConversionOptions,
        "Feature": converter.Feature,
        "autograph_artifact": _artifact,
        "converted_call": converted_call,
    }.items():
        setattr(module, name, value)
    return module


def _artifact(function: Any) -> Any:
    """Marks a function that converted code defines: it is converted with the code around it."""
    function.autograph_info__ = True
    return function


def _converted_code(function: types.FunctionType) -> types.CodeType:
    """Returns the code of the converted function, with the lines of the original."""
    nodes, context = _transpiler().transform_function(function, _program())
    name = context.info.name
    if isinstance(nodes, ast.Lambda):
        nodes = ast.Assign(targets=[ast.Name(name, ctx=ast.Store())], value=nodes)
    else:
        nodes.name = name
    free = [*function.__code__.co_freevars, "ag__"]
    declared = [ast.Assign([ast.Name(v, ctx=ast.Store())], ast.Constant(None)) for v in free]
    arguments = ast.arguments([], [], None, [], [], None, [])
    outer = ast.FunctionDef(
        "outer", arguments, [*declared, nodes, ast.Return(ast.Name(name, ctx=ast.Load()))], []
    )
    if sys.version_info >= (3, 12):
        outer.type_params = []
    _set_lines(outer, function.__code__.co_firstlineno)
    module = ast.Module([outer], [])
    flags = _future_flags(function.__code__)
    code = compile(module, function.__code__.co_filename, "exec", flags, dont_inherit=True)
    (of_outer,) = _codes_in(code)
    (made,) = _codes_in(of_outer)
    return _renamed(made, function.__code__.co_name, function.__code__.co_qualname)


def _future_flags(code: types.CodeType) -> int:
    import __future__

    every = (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
    return code.co_flags & sum(set(every))


def _codes_in(code: types.CodeType) -> list[types.CodeType]:
    return [const for const in code.co_consts if isinstance(const, types.CodeType)]


def _renamed(code: types.CodeType, name: str, qualname: str) -> types.CodeType:
    """Returns the code with the names that the user knows, also for blocks of it."""
    consts = []
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            is_block = const.co_name.startswith(_BLOCKS)
            own = name if is_block else const.co_name
            const = _renamed(const, own, qualname if is_block else f"{qualname}.<locals>.{own}")
        consts.append(const)
    return code.replace(co_name=name, co_qualname=qualname, co_consts=tuple(consts))


def _set_lines(root: ast.AST, first_line: int) -> None:
    """Gives every node the line of the user's code that it comes from."""
    from malt.pyct import anno

    def visit(node: ast.AST, line: int) -> None:
        origin = anno.getanno(node, anno.Basic.ORIGIN, default=None)
        if origin is not None:
            line = origin.loc.lineno
        if "lineno" in node._attributes:
            node.lineno, node.col_offset = line, 0  # type: ignore[attr-defined]
            node.end_lineno = node.end_col_offset = None  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            visit(child, line)

    visit(root, first_line)


@functools.cache
def _program() -> Any:
    from malt.core import converter

    return converter.ProgramContext(options=_options())


@functools.cache
def _options() -> Any:
    from malt.core import converter

    return converter.ConversionOptions(
        recursive=True, optional_features=(converter.Feature.BUILTIN_FUNCTIONS,)
    )


@functools.cache
def _transpiler() -> Any:
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
    from malt.core import unsupported_features_checker
    from malt.impl.api import PyToPy
    from malt.lang import directives as lang
    from malt.pyct import anno, cfg, qual_names
    from malt.pyct.static_analysis import activity, liveness, reaching_definitions, reaching_fndefs
    from malt.pyct.static_analysis.annos import NodeAnno as Scopes
    from malt.pyct.transpiler import GenericTranspiler

    class ControlFlow(control_flow.ControlFlowTransformer):
        """Also takes variables of outer functions out of blocks, whatever comes after them."""

        def _get_block_basic_vars(self, modified: Any, live_in: Any, live_out: Any) -> Any:
            declared = self._declared() & modified
            return super()._get_block_basic_vars(modified, live_in, live_out) | declared

        def _get_block_vars(self, node: Any, modified: Any) -> Any:
            names, undefined, num_outs = super()._get_block_vars(node, modified)
            declared = self._declared()
            outs = [v for k, v in enumerate(names) if k < num_outs or v in declared]
            return outs + [v for v in names if v not in outs], undefined, len(outs)

        def visit_If(self, node: Any) -> Any:  # noqa: N802
            live = anno.getanno(node, anno.Static.LIVE_VARS_OUT)
            scopes = [anno.getanno(node, k) for k in (Scopes.BODY_SCOPE, Scopes.ORELSE_SCOPE)]
            used = scopes[0].referenced | scopes[1].referenced
            made = super().visit_If(node)
            names = ast.Tuple([*map(ast.Constant, sorted(map(str, used - live)))], ast.Load())
            made[-1].value.keywords.append(ast.keyword("dead", names))
            return made

        def _declared(self) -> Any:
            scope = self.state[control_flow._Function].scope
            return frozenset(scope.nonlocals | scope.globals)

    class Directives(directives.DirectivesTransformer):
        """Knows `set_loop_options`."""

        def visit_Expr(self, node: Any) -> Any:  # noqa: N802
            made = super().visit_Expr(node)
            called = getattr(getattr(made, "value", None), "func", None)
            known = called and anno.getanno(called, directives.STATIC_VALUE, default=None)
            if known is not set_loop_options:
                return made
            self._process_statement_directive(made.value, lang.set_loop_options)
            return None

    class ConditionalExpressions(conditional_expressions.ConditionalExpressionTransformer):
        """Also converts the expressions inside of an expression."""

        def visit_IfExp(self, node: Any) -> Any:  # noqa: N802
            return super().visit_IfExp(self.generic_visit(node))

    def of_control_flow(node: Any, context: Any) -> Any:
        graphs = cfg.build(node)
        node = activity.resolve(qual_names.resolve(node), context, None)
        for analysis in (reaching_definitions, reaching_fndefs, liveness):
            node = analysis.resolve(node, context, graphs)
        return ControlFlow(context).visit(node)

    class Transpiler(GenericTranspiler):
        """The passes of AutoGraph."""

        def get_transformed_name(self, node: Any) -> str:
            return f"ag__{super().get_transformed_name(node)}"

        def transform_ast(self, node: Any, context: Any) -> Any:
            node = Simplified().visit(node)
            unsupported_features_checker.verify(node)
            node = functions.transform(PyToPy.initial_analysis(self, node, context), context)
            # Each pass takes milliseconds, so only those run that have something to do.
            kinds = {type(part) for part in ast.walk(node)}
            if ast.Expr in kinds:
                node = Directives(context).visit(node)
            if ast.Break in kinds:
                node = break_statements.transform(node, context)
            node = _Statements().visit(node)
            if kinds & {ast.Break, ast.Continue}:  # the pass before makes `continue` of `break`
                node = continue_statements.transform(node, context)
            if _returns_early(node):
                node = return_statements.transform(node, context)
            node = of_control_flow(call_trees.transform(node, context), context)
            if ast.IfExp in kinds:
                node = ConditionalExpressions(context).visit(node)
            node = logical_expressions.transform(node, context)
            return variables.transform(node, context)

    return Transpiler()


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
        from malt.pyct import origin_info, templates

        made = templates.replace(template, **parts)
        origin_info.copy_origin(node, made)
        return made
