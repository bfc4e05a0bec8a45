"""The context that code runs in: the strategy scope, replica and cross-replica contexts."""

from distributary.context._replica_context import InputContext, ReplicaContext, ValueContext
from distributary.context._stack import (
    Mode,
    StrategyScope,
    another_thread_in_scope,
    check_same_strategy,
    current_mode,
    default_mode,
    entered,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    in_default_context,
    in_global_view,
    register_default_mode,
    require_cross_replica,
)
