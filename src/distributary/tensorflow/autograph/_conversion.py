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
from typing import Any, TypeVar

from distributary.tensorflow.autograph import _operators, _recorded
from distributary.tensorflow.autograph._reached import is_of_library
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
    shape_invariants: object = None,
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


def converted_call(f: Any, args: tuple[Any, ...], kwargs: Any, scope: object = None) -> Any:
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


def _in_original_context(f: Any, args: object, scope: object) -> Any:
    """Calls a builtin function that looks at the frame of its caller."""
    from malt.operators import py_builtins

    call = getattr(py_builtins, f"{f.__name__}_in_original_context")
    return call(scope) if f in (locals, globals) else call(f, args, scope)


def is_convertible(function: object) -> bool:
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
    with _lock:
        if function.__code__ not in _converted:
            try:
                _converted[function.__code__] = _converted_code(function)
            except Exception as error:  # malt raises what comes, for syntax that it does not know
                reason = str(error).partition("\n")[0] or repr(error)
                _converted[function.__code__] = reason
        code = _converted[function.__code__]
    if isinstance(code, str):
        scope = current_scope()
        if scope is not None:
            scope.unconverted[function.__qualname__] = code
        return function
    closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells = tuple(
        types.CellType(_operators_of_malt()) if name == "ag__" else closure[name]
        for name in code.co_freevars
    )
    form = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, cells
    )
    form.__kwdefaults__ = function.__kwdefaults__
    form.__qualname__, form.__module__ = function.__qualname__, function.__module__
    return form


_lock = threading.RLock()
# By the code of functions: the converted code, or why there is none.
_converted: "weakref.WeakKeyDictionary[types.CodeType, types.CodeType | str]" = (
    weakref.WeakKeyDictionary()
)


@functools.cache
def _operators_of_malt() -> types.ModuleType:
    """Returns the module that converted code knows as `ag__`."""
    from malt.operators import variables

    module = types.ModuleType("ag__")
    vars(module).update(vars(_recorded) | vars(_operators) | vars(variables))
    vars(module).update(autograph_artifact=_artifact, converted_call=converted_call)
    return module


def _artifact(function: Any) -> Any:
    """Marks a function that converted code defines: it is converted with the code around it."""
    function.autograph_info__ = True
    return function


def _converted_code(function: types.FunctionType) -> types.CodeType:
    """Returns the code of the converted function, with the lines of the original."""
    nodes, context = _transpiler().transform_function(function, None)
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
    (inner,) = _codes_in(of_outer)
    return _renamed(inner, function.__code__.co_name, function.__code__.co_qualname)


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
            label = name if is_block else const.co_name
            const = _renamed(const, label, qualname if is_block else f"{qualname}.<locals>.{label}")
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
def _transpiler() -> Any:
    from distributary.tensorflow.autograph._passes import Transpiler

    return Transpiler(set_loop_options)
