"""Keras variables under a strategy, and their first values.

While Keras saves or loads a model, it reads and assigns variables one by one, in one process. But
no worker can put together a variable that lies in parts on several workers, and none should hold
the whole model. So the worker whose turn it is says which variable it is about to read or to
assign, and the others do that with it.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from distributary._threads import bound
from distributary.checkpoint import settle
from distributary.context import get_strategy, has_strategy, in_global_view
from distributary.devices import (
    JobEvent,
    array_of_parts,
    current_trial,
    dispatcher_for,
    fetch_whole,
    in_device_memory,
    in_host_memory,
    is_divided,
    is_gathered,
    job_programs,
    latest_program,
    local_copy,
    make_mesh,
    own_copies,
    put_replicated,
    put_sharded,
    sharding_on,
    stored_shards,
    without_memory,
)
from distributary.errors import InvalidValueError, UnsupportedError
from distributary.job import Turn, consensus, in_turn
from distributary.keras_bridge import _keras_private as keras_private
from distributary.tracing import current_scope, describe_value, gathered, noted_read
from distributary.variables import ShardedVariable, Variable, colocated_with, computed

_READ, _ASSIGN = "read", "assign"


def saved_variables(model: Any) -> list[Any]:
    """Returns all variables that Keras saves with a model, in the same order on all workers.

    Keras follows attributes, such as an optimizer of one's own, and not only `model.variables`.
    """
    by_id: dict[int, Any] = {}
    seen: set[int] = set()

    def search(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, (keras.Layer, keras.optimizers.Optimizer)):
            by_id.update((id(variable), variable) for variable in value.variables)
            parts: Iterable[Any] = [vars(value)[name] for name in sorted(vars(value))]
        elif isinstance(value, dict):
            parts = value.values()
        else:
            parts = value if isinstance(value, (list, tuple)) else ()
        for part in parts:
            search(part)

    search(model)
    return list(by_id.values())


def is_in_parts_of_workers(variable: Any) -> bool:
    """Returns whether each worker has only a part of a variable."""
    layout = variable._layout
    return is_divided(layout) and not layout.is_fully_addressable


# The `extended` of the strategy whose workers save or load together. If it is the turn of this one,
# also a function that tells the others what it does next with a variable.
_together: ContextVar[tuple[Any, Callable[[str, Any], None] | None] | None] = ContextVar(
    "workers that save or load together", default=None
)


def take_turn(worker: int, model: Any, strategy: Any, act: Callable[[], None]) -> None:
    """Runs `act` on one worker, which may read and assign the model's variables in parts.

    All workers call this. Only the first worker may assign.

    Raises:
        OSError: on the other workers, if `act` raises one.
        InvalidValueError: on the other workers, if `act` raises another error.
    """
    extended = strategy.extended
    if extended.num_workers == 1:
        act()
        return
    name = getattr(model, "name", type(model).__name__)
    variables = list(filter(is_in_parts_of_workers, saved_variables(model)))

    def act_on(turn: Turn) -> None:
        def say(what: str, variable: Any) -> None:
            number = next((i for i, v in enumerate(variables) if v is variable), None)
            if number is None:
                raise InvalidValueError(
                    f"{turn.place}: {variable.path!r} is in parts on several workers, and belongs"
                    " to no attribute of the model that Keras saves. Make it a variable of a layer,"
                    " or save it with dist.checkpoint."
                )
            turn.say(what, number)

        with bound(_together, (extended, say)):
            act()

    def take_part(what: str, number: int) -> None:
        variable = variables[number]
        if what == _READ:
            fetch_whole(variable._value, variable.shape)
            return
        zeros = np.zeros(variable.shape, jnp.dtype(variable._dtype))
        variable._value = put_sharded(_of_chief(extended, variable, zeros), variable._layout)
        variable._shared = False

    problem = in_turn(worker, f"saving or loading {name}", act_on, take_part)
    if problem is not None:
        raise type(problem)(f"Worker {worker} could not save or load {name}: {problem}")


@contextmanager
def loading_together(strategy: Any) -> Iterator[None]:
    """Runs the block, in which all workers load the same model; the first worker's values count."""
    with bound(_together, (strategy.extended, None)), job_programs.alone():
        yield


def before_read(variable: Any) -> None:
    """Lets the other workers take part in reading a variable in parts, if they wait for that."""
    _, say = _together.get() or (None, None)
    if say is not None:
        say(_READ, variable)


def before_assign(variable: Any, value: Any) -> Any:
    """Returns the value to assign to a variable in parts: that of the first worker, if all load."""
    extended, say = _together.get() or (None, None)
    if extended is None:
        return value
    if say is not None:
        say(_ASSIGN, variable)
    elif (job := consensus()) is not None:
        # The file of another worker may lack what this one has.
        job.exchange(f"loading {variable.path} {list(variable.shape)}", b"")
    return _of_chief(extended, variable, value)


def _of_chief(extended: Any, variable: Any, value: Any) -> np.ndarray:
    array = np.asarray(value, jnp.dtype(variable._dtype))
    (of_chief,) = extended.from_chief([array], f"the value of {variable.path} that is loaded")
    return np.asarray(of_chief)


# First values, each computed by one program, where it is stored.


_CONSTANTS = {keras.initializers.Zeros: 0, keras.initializers.Ones: 1}
_RANDOM = {
    kind
    for kind in vars(keras.initializers).values()
    if isinstance(kind, type) and "seed" in inspect.signature(kind).parameters
}


@final
class _Seed(keras.random.SeedGenerator):
    """A generator for one draw: of a value of a program."""

    def __init__(self, seed: jax.Array) -> None:
        self._seed_of_program = seed

    def next(self, ordered: bool = True) -> jax.Array:
        return self._seed_of_program


@jax.disable_jit(False)  # for debugging; what is compiled below has no other form
def first_value(variable: Any, initializer: Any, strategy: Any) -> Any:
    """Returns the value of an initializer of Keras for a variable; None for other initializers.

    Those of Keras give the same value in every process, and leave nothing behind. Others may draw
    from generators of their own, so they run as they are. A normal distribution around another
    number than 0 can differ in the last bit from what Keras computes operation by operation.

    Each device computes its part of a value that is stored in parts, from the chief's seed. Other
    values are on one device, or NumPy's.
    """
    shape, dtype = tuple(variable._shape), variable._dtype
    layout = variable._layout if is_divided(variable._layout) else None

    def agreed(seeds: list[np.ndarray]) -> list[Any]:
        what = f"the creation of {_description(variable)}"
        return seeds if layout is None else strategy.extended.from_chief(seeds, what)

    constant = _CONSTANTS.get(type(initializer))
    if constant is not None:
        agreed([])
        return np.broadcast_to(np.asarray(constant, jnp.dtype(dtype)), shape)
    seed = getattr(initializer, "seed", None)
    if type(initializer) not in _RANDOM or not isinstance(seed, int):
        return None
    kind: Any = type(initializer)
    attributes = {k: v for k, v in vars(initializer).items() if k not in ("seed", "_init_seed")}
    settings = tuple([(k, tuple(v) if isinstance(v, list) else v) for k, v in attributes.items()])
    try:
        config: Any = jax.config
        bits = config.jax_threefry_partitionable, config.jax_default_prng_impl
        program = _program(kind, settings, shape, dtype, layout, bits)
    except TypeError:  # a setting is an array
        return None
    # What Keras makes of a number that is a seed.
    (seed,) = agreed([np.asarray([seed, 0], np.uint32)])
    if layout is None:
        return program(seed)
    # Ends before others begin, whose temporaries would be in memory, too. So there is no token: a
    # step may donate the value.
    devices = tuple(layout.mesh.devices.flat)
    return dispatcher_for(devices).run(
        lambda seed: program(seed).block_until_ready(), lambda value: None, seed
    )


@functools.lru_cache(maxsize=256)
def _program(
    kind: Any,
    settings: Any,
    shape: tuple[int, ...],
    dtype: str,
    layout: NamedSharding | None,
    bits: object,  # the options of JAX for random bits
) -> Callable[[np.ndarray], jax.Array]:
    def value(seed: jax.Array) -> jax.Array:
        initializer = object.__new__(kind)
        vars(initializer).update(settings, seed=_Seed(seed))
        whole = keras.ops.convert_to_tensor(initializer(shape, dtype=dtype))
        return whole if layout is None else stored_shards(whole, layout)

    everywhere = None if layout is None else NamedSharding(layout.mesh, P())
    first = jax.devices()[0] if layout is None else layout.mesh.devices.flat[0]
    options = _CPU_OPTIONS if first.platform == "cpu" else None
    program = jax.jit(
        value, in_shardings=everywhere, out_shardings=layout, compiler_options=options
    )
    # Compiled, it gives an array also in a trace. `ensure_compile_time_eval` does that, too, but
    # makes constants of what does not depend on the seed: arrays as large as the variable.
    compiled: Callable[[np.ndarray], jax.Array] = program.lower(
        jax.ShapeDtypeStruct((2,), np.uint32)
    ).compile()
    return compiled


# Compiling a program that runs about once costs more than running it. The simplifier of algebra
# would round in another way than Keras does, operation by operation.
_CPU_OPTIONS: dict[str, str | bool] = {
    "xla_backend_optimization_level": "1",
    "xla_disable_hlo_passes": "algsimp",
}
if jax.__version_info__ < (0, 11):  # since then, nothing else is there, and the option is gone
    _CPU_OPTIONS["xla_cpu_use_fusion_emitters"] = False


# Variables


# The classes that keep the values of Keras variables on servers.
ON_SERVERS = (Variable, ShardedVariable)


def sharding_of(strategy: Any, variable: Any) -> Any:
    """Returns the sharding of a variable of a strategy; None leaves it to JAX."""
    if not is_sum(variable):
        extended, shape = strategy.extended, variable.shape
        if hasattr(variable, "_distributary_beside"):  # of an optimizer
            parts = extended.optimizer_layout(shape, variable._distributary_beside)
        else:
            dim = getattr(variable, "_distributary_dim", None)
            parts = extended.parameter_layout(shape, variable._dtype, variable.path, dim)
        if parts is not None:
            return parts
    sharding = strategy.extended.variable_layout().replicated
    has_mesh = sharding is None or isinstance(sharding, NamedSharding)
    return sharding if has_mesh else _with_mesh(sharding)


@functools.lru_cache(maxsize=32)
def _with_mesh(sharding: Any) -> NamedSharding:
    # Keras needs the mesh of a sharding.
    return NamedSharding(make_mesh(tuple(sharding.device_set)), P())


_in_optimizer: ContextVar[bool] = ContextVar("in an optimizer", default=False)


def optimizing() -> AbstractContextManager[None]:
    """Runs the block as the work of an optimizer, for which a trace does not gather parts."""
    return bound(_in_optimizer, True)


def in_optimizer() -> bool:
    """Returns whether an optimizer runs the caller."""
    return _in_optimizer.get()


def _description(variable: Any) -> str:
    """Returns a text that has to be the same on all workers."""
    return (
        f"Keras variable {variable.path!r} {variable._dtype}{list(variable.shape or ())} with"
        f" {variable.synchronization}, {variable.aggregation}, trainable={variable.trainable}"
    )


def init(
    original: Callable[..., Any],
    self: Any,
    initializer: Any,
    shape: Any = None,
    dtype: Any = None,
    *args: Any,
    **kw: Any,
) -> None:
    """Lets a function that is traced create a variable, also from a value.

    As in TensorFlow, it is then traced once more, because Python code asks whether layers and
    optimizers are built.
    """
    scope = current_scope() if keras_private.in_stateless_scope() else None
    is_value = not callable(initializer) and not isinstance(initializer, str)
    if scope is not None and is_value:
        with jax.ensure_compile_time_eval():
            value = keras.ops.convert_to_tensor(initializer, dtype)
        if not isinstance(value, jax.core.Tracer):
            initializer, is_value = (lambda shape, dtype: jnp.asarray(value, dtype)), False
            shape, dtype = value.shape, value.dtype
    if isinstance(keras_private.current_layer(), keras.optimizers.Optimizer):
        # Keras hands on the layout of the variable to which it belongs. Without one, Keras
        # initializes it as a whole, and it is split afterwards.
        self._distributary_beside = beside = kw.get("layout")
        if has_strategy() or isinstance(beside, ON_SERVERS):
            kw["layout"] = None
    _note_dim(self, kw.get("name"), shape)
    original(self, initializer, shape, dtype, *args, **kw)
    if is_value and is_divided(getattr(self, "_layout", None)):
        self._shape = tuple(np.shape(initializer))  # Keras has that of the stored array
    if scope is not None:
        scope.created.append(self.path)


def _note_dim(variable: Any, name: object, shape: Any) -> None:
    """Notes along which dim the layer that creates a variable divides it, if layers decide it."""
    rules, layer = get_strategy().extended.layout_rules, keras_private.current_layer()
    if shape is None or not has_strategy():
        return
    if rules.is_auto and rules.num_devices > 1 and isinstance(layer, keras.Layer):
        dim = _divided_dim(rules, layer, name, tuple(shape))
        if dim is not None and shape[dim] % rules.num_devices == 0:
            variable._distributary_dim = dim


def _divided_dim(rules: Any, layer: Any, name: object, shape: tuple[int, ...]) -> int | None:
    """Returns the dim of a new variable of a layer that devices divide; None for the whole."""
    if isinstance(layer, keras.layers.Embedding):  # its vocabulary, also where it is reversed
        return {"embeddings": 0, "reverse_embeddings": len(shape) - 1}.get(str(name))
    if shape and vars(layer).get("num_experts") == shape[0]:  # as a bank of keras-hub has it
        return 0
    is_einsum = isinstance(layer, keras.layers.EinsumDense)
    if name not in ("kernel", "bias") or not (is_einsum or isinstance(layer, keras.layers.Dense)):
        return None
    equation = layer.equation if is_einsum else "ab,bc->ac"
    block = keras_private.current_path().rpartition("/")[0]
    kernel, bias = (shape, None) if name == "kernel" else (tuple(layer.weights[0].shape), shape)
    return rules.dim_of_product(block, layer.name, equation, kernel, bias)


def initialize(original: Callable[..., Any], self: Any, initializer: Any) -> None:
    """Computes the first value of a variable of a strategy on the devices that store it."""
    zeros = without_memory(self._shape, self._dtype)
    if zeros is not None:
        self._initialize(zeros)
        return
    strategy = _strategy_of_new(self)
    if strategy is None:
        original(self, initializer)
        return
    if not keeps_on_servers(strategy):
        _lay_out(self, strategy)
    value = first_value(self, initializer, strategy)
    if value is None:
        original(self, initializer)
        return
    if is_divided(self._layout):
        self._value = put_sharded(value, self._layout)
    else:
        self._initialize(value)
    self._shared = False


def direct_assign(original: Callable[..., Any], self: Any, value: Any) -> None:
    """Places the values of a variable where it lies; they are equal on all workers.

    Values always get their layout. If the layout has only one device, Keras leaves a value that is
    already there as it is. But `jax.jit` sees another type then, and compiles the step once more.
    """
    strategy = _strategy_of_new(self)
    argument = value
    if not isinstance(value, jax.core.Tracer):
        zeros = None if current_trial() is None else without_memory(value.shape, value.dtype)
        is_whole = isinstance(value, jax.Array) and len(value.devices()) == 1
        is_placed = strategy is not None or self._layout is not None
        if zeros is not None:
            value = zeros
        elif is_whole and is_placed and not is_divided(self._layout):
            # Its memory may be that of an array of NumPy, which may change next: so this waits.
            value = own_copies([value])[0].block_until_ready()
    is_own = value is not argument
    if strategy is not None and keeps_on_servers(strategy):
        self._distributary_strategy = strategy
        self._value = self._layout = on_servers(self, value)
        return
    if strategy is not None:
        _lay_out(self, strategy)  # and the first value is the chief's
        value = strategy.extended.variable_layout().initial(value, _description(self))
    current = getattr(self, "_value", None)
    if isinstance(current, ON_SERVERS):
        current.assign(value)
        return
    layout = self._layout
    if isinstance(layout, NamedSharding):
        if not layout.is_fully_addressable:
            what = f"assign of Keras variable {self.path!r}"
            job_programs.begin(JobEvent(what), (describe_value(value),))
        if not isinstance(value, jax.core.Tracer):
            if is_divided(layout) and not layout.is_fully_addressable:
                value = before_assign(self, value)
            value = _put(value, layout)
            is_own |= is_divided(layout) and value is not argument
    with latest_program.lock:
        original(self, value)
        self._shared = not is_own  # whoever assigns may keep an array that was not copied


def _strategy_of_new(variable: Any) -> Any:
    """Returns the strategy of a variable that gets its first value; None for any other variable.

    A variable that was created in a trace gets its value afterwards, outside of the scope. It
    belongs to the strategy that has used it in the trace; servers get it when they use it next.
    """
    if hasattr(variable, "_ndim") and variable._initializer is None:
        return None
    if has_strategy():
        return get_strategy()
    stand_in = getattr(variable, "_distributary_stand_in", None)
    if stand_in is None or keeps_on_servers(stand_in.strategy):
        return None
    return None if stand_in.strategy.extended.is_default else stand_in.strategy


def _lay_out(variable: Any, strategy: Any) -> None:
    """Gives a variable that is created in a scope its layout."""
    variable._distributary_strategy = strategy
    if variable._layout is None or strategy.extended.num_workers > 1:
        variable._layout = sharding_of(strategy, variable)


@final
class _ModelStep:
    """What a model's step has assigned so far, beside what Keras' trainer takes from its scopes."""

    def __init__(self) -> None:
        self.kept: set[int] = set()  # of variables that have been assigned for good, by `id`
        self.applied = keras.StatelessScope()  # what the optimizer has assigned


_model_step: ContextVar[_ModelStep | None] = ContextVar("step of a model", default=None)


def in_model_step() -> bool:
    """Returns whether a model's step runs the caller."""
    return _model_step.get() is not None


@contextmanager
def model_step() -> Iterator[Callable[[Any], bool]]:
    """Runs the block, a model's step; yields whether a variable was assigned for good in it.

    Keras' trainer computes with values in scopes, each for some of the variables, and takes the new
    values of these. Others would be constants of the program, and what is assigned to them would be
    dropped with the scope: the state of `tf.random`, a metric that a layer updates, an average of
    weights in `compute_metrics`. They are read and assigned as outside of these scopes.
    """
    step = _ModelStep()
    with bound(_model_step, step):
        yield lambda variable: id(variable) in step.kept


@contextmanager
def in_scope_of_keras(scope: Any) -> Iterator[None]:
    inner = keras_private.get_stateless_scope()
    keras_private.set_global_attribute("stateless_scope", scope)
    try:
        yield
    finally:
        keras_private.set_global_attribute("stateless_scope", inner)


def _outside_of_keras(scope: Any) -> Any:
    """Returns the trace around scopes of Keras, or None."""
    while type(scope) is keras.StatelessScope:
        scope = scope.original_scope
    return scope


def scope_that_knows(variable: Any) -> AbstractContextManager[None]:
    """Runs the block in the innermost scope that has a value of a variable, see `model_step`."""
    scope, step = (inner := keras_private.get_stateless_scope()), _model_step.get()
    is_step = inner is not None and (step is not None or current_scope() is not None)
    if not is_step or keras_private.in_symbolic_scope():
        return nullcontext()
    if step is not None and id(variable) in step.kept:
        scope = _outside_of_keras(inner)
    else:
        while type(scope) is keras.StatelessScope and scope.get_current_value(variable) is None:
            scope = scope.original_scope
        if step is not None and type(scope) is not keras.StatelessScope:
            scope = step.applied if step.applied.get_current_value(variable) is not None else scope
    return nullcontext() if scope is inner else in_scope_of_keras(scope)


def add_update(original: Callable[..., Any], self: Any, update: tuple[Any, Any]) -> None:
    """Assigns, in a model's step, also what Keras would drop with its scope, see `model_step`."""
    variable, value = update
    step = _model_step.get()
    if step is None:
        original(self, update)
        return
    if id(variable) in self.state_mapping:
        original(self, update)
        if in_optimizer():
            original(step.applied, update)
        if id(variable) not in step.kept:
            return
    step.kept.add(id(variable))
    scope = _outside_of_keras(self)
    if scope is None:
        value = computed(f"Keras variable {variable.path!r}: assign", value)
    with in_scope_of_keras(scope):
        variable.assign(value)


def value(original: property) -> property:
    """Makes a variable of several workers read this worker's copy, outside of a step.

    A variable in host memory is copied to its device for every read. One that is stored in parts is
    put together. The value stays valid while steps of other threads replace it.
    """
    assert original.fget is not None
    read_inside = original.fget

    def read(variable: Any) -> Any:
        with scope_that_knows(variable):
            return read_inside(variable)

    def value(self: Any) -> Any:
        # What is put together is cast afterwards, and a tape records the cast, too.
        uncast = keras_private.AutocastScope(None)
        with latest_program.lock, uncast:  # so that programs see `_shared` before they donate
            current = read(self)
            # In a symbolic scope, Keras wants shapes only.
            is_symbolic = keras_private.in_symbolic_scope()
            if not isinstance(current, ON_SERVERS):
                current = in_device_memory(current)
                if current is self._value and not is_symbolic:
                    self._shared = current_trial() is None
        if isinstance(current, ON_SERVERS):
            current = jnp.zeros(current.shape, current.dtype) if is_symbolic else current._peek()
        else:
            current = noted_read(self, whole_value(self, current))
        return _as_used(self, self._maybe_autocast(current))

    return property(value, doc=original.__doc__)


def is_sum(variable: Any) -> bool:
    """Returns whether a value stands for a sum over replicas or workers, as that of a metric."""
    return bool(variable.synchronization == "on_read" and variable.aggregation == "sum")


def _put(value: Any, sharding: Any) -> Any:
    zeros = without_memory(value.shape, value.dtype, sharding)
    if zeros is not None:
        return zeros
    return (put_sharded if is_divided(sharding) else put_replicated)(value, sharding)


def _as_used(variable: Any, current: Any) -> Any:
    """Returns a value in a trace as layers compute with it: whole."""
    is_whole = not is_gathered(variable._layout) or not isinstance(current, jax.core.Tracer)
    if is_whole or in_optimizer() or not in_global_view():
        return current
    # The layout has the mesh of the values, which is another if the program is only compiled.
    mesh = get_strategy().extended.mesh
    return gathered(current, sharding_on(mesh, variable._layout.spec))


def keeps_on_servers(strategy: Any) -> bool:
    """Returns whether the variables of a strategy are kept elsewhere than in this process."""
    return strategy.extended.variable_layout().kind is not None


def on_servers(variable: Any, value: Any) -> Any:
    """Makes the variable that keeps the value of a Keras variable, for strategies with servers.

    That of an optimizer lies next to the variable to which it belongs.
    """
    beside = getattr(variable, "_distributary_beside", None)
    is_beside = isinstance(beside, ON_SERVERS)
    with get_strategy().scope(), colocated_with(beside) if is_beside else nullcontext():
        return Variable(value, bool(variable._trainable), variable.path, variable._dtype)


def whole_value(variable: Any, value: Any) -> Any:
    """Turns the stored array of a variable into a value that this process can use."""
    layout = variable._layout
    in_parts = is_divided(layout) and isinstance(value, jax.Array)
    if not in_parts or isinstance(value, jax.core.Tracer) or value.is_fully_replicated:
        return in_device_memory(local_copy(value))
    if value.is_fully_addressable and value.shape == tuple(variable.shape):
        return array_of_parts(value)  # JAX computes with them
    with jax.ensure_compile_time_eval():
        if not layout.is_fully_addressable:
            before_read(variable)
        whole = fetch_whole(value, variable.shape)
        if layout.is_fully_addressable:
            return jax.device_put(whole, NamedSharding(layout.mesh, P()))
        return jnp.asarray(whole)


def place(variable: Any, strategy: Any) -> None:
    """Moves a variable that was created elsewhere to the devices or servers of a strategy."""
    if keeps_on_servers(strategy):
        value = variable._value
        if value is not None and not isinstance(value, ON_SERVERS):
            with strategy.scope(), jax.ensure_compile_time_eval():
                stored = on_servers(variable, whole_value(variable, value))
                variable._value = variable._layout = stored
        return
    sharding, value = sharding_of(strategy, variable), variable._value
    if sharding is None or value is None:  # a variable that is created in a trace is placed later
        return
    is_elsewhere = value.sharding.device_set != sharding.device_set or in_host_memory(
        value.sharding
    ) != in_host_memory(sharding)
    # On a single device, a value can have two layouts, see `direct_assign`.
    has_one_form = sharding.is_fully_addressable or is_divided(sharding)
    if is_elsewhere or (has_one_form and value.sharding != sharding):
        with jax.ensure_compile_time_eval():  # in case a function is being traced
            whole = whole_value(variable, value)
            initial = strategy.extended.variable_layout().initial(whole, _description(variable))
            variable._value = _put(initial, sharding)
        if is_divided(sharding) or is_divided(variable._layout):
            variable._distributary_stand_in = None  # it has the layout
    variable._layout = sharding


def refuse(original: Callable[..., Any], self: object, *args: Any, **kwargs: Any) -> None:
    """Refuses to create variables in a scope if Keras runs on another backend than JAX."""
    if has_strategy():
        raise UnsupportedError(
            f"Keras runs on the backend {keras.backend.backend()!r}, but {get_strategy()!r}"
            " distributes JAX. Set the environment variable KERAS_BACKEND=jax before keras is"
            ' imported: os.environ["KERAS_BACKEND"] = "jax" in the first lines of the script.'
        )
    original(self, *args, **kwargs)


def add_variable(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives the variables of an optimizer that is complete the state that waits for them."""
    variable = original(self, *args, **kwargs)
    if self.built:
        settle(self, len(self.variables))
    return variable
