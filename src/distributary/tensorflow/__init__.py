"""TensorFlow's names on JAX and Keras 3, and AutoGraph.

Programs import `distributary.compat.tensorflow`. The core does not know this package.
"""
