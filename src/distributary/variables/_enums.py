"""When the copies of a variable are brought together, and how."""

import enum


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are combined.

    * `AUTO`: ON_WRITE.
    * `NONE`: never; refused by strategies with replicas.
    * `ON_WRITE`: at every assignment, so that all copies are equal (mirrored).
    * `ON_READ`: when read in a cross-replica context or saved; in `run` each replica has its own.

    Source: `tf.VariableSynchronization`.
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How values that replicas assign, or copies that are read, become one value.

    * `NONE`: they are not combined.
    * `SUM`, `MEAN`: their sum or mean.
    * `ONLY_FIRST_REPLICA`: the value of replica 0 counts.

    Source: `tf.VariableAggregation`.
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3
