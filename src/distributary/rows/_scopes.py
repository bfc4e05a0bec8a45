"""Names of scopes in which the analysis of rows knows what the code means."""

OWN_STATISTICS = "statistics_of_replicas"
"""Name of the scope in which any use of sums over rows is fine: its code knows that they are the
replica's own sums, or takes those of all replicas."""

MEANS = "means_of_replicas"
"""Name of the scope in which a replica's losses become a part of that of the batch, which is their
mean. Means over rows are combined to the mean of the batch; sums over rows are not to its sum."""

STATE = "state_of_layers"
"""Name of the scope that combines what layers keep besides weights, such as moving averages. Means
over rows are combined to the mean of the batch; sums over rows are not combined to its sum."""
