"""The options that say when and how the copies of a variable are combined."""

import enum


class VariableSynchronization(enum.Enum):
    """The time at which the copies of a variable are combined.

    * `AUTO`: the same as ON_WRITE.
    * `NONE`: never. Strategies with replicas refuse it.
    * `ON_WRITE`: at every assignment, so that all copies are equal (mirrored).
    * `ON_READ`: when the variable is saved, or read in a cross-replica context. In `run`, each
      replica has its own value.

    Source: `tf.VariableSynchronization`.
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """The way in which values that replicas assign, or copies that are read, become one value.

    * `NONE`: they are not combined.
    * `SUM`, `MEAN`: their sum or mean.
    * `ONLY_FIRST_REPLICA`: only the value of replica 0 counts.

    Source: `tf.VariableAggregation`.
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3
