"""Operations of `tf.linalg`; see `Operation` for how arguments are converted."""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from distributary.tensorflow._operations import Axes, Operation, named, taking


def global_norm(t_list: list[Array | None]) -> Array:
    """`tf.linalg.global_norm`; ignores None."""
    return jnp.sqrt(sum(jnp.sum(t**2) for t in t_list if t is not None))


def matmul(
    a: Array,
    b: Array,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    a_is_sparse: bool = False,
    b_is_sparse: bool = False,
    output_type: DTypeLike | None = None,
    grad_a: bool = False,
    grad_b: bool = False,
) -> Array:
    """`tf.matmul`."""
    first = a.mT.conj() if adjoint_a else a.mT if transpose_a else a
    second = b.mT.conj() if adjoint_b else b.mT if transpose_b else b
    return jnp.matmul(first, second, preferred_element_type=output_type)


def einsum(equation: str, *inputs: Array) -> Array:
    """`tf.einsum`."""
    return jnp.einsum(equation, *inputs)


def norm(
    tensor: Array, ord: str | float = "euclidean", axis: Axes = None, keepdims: bool = False
) -> Array:
    """`tf.norm`: over all elements by default."""
    kind = None if ord == "euclidean" else ord
    if axis is not None:
        return jnp.linalg.norm(tensor, kind, axis, keepdims)
    flat = jnp.linalg.norm(tensor.ravel(), kind)
    return flat.reshape([1] * tensor.ndim) if keepdims else flat


def band_part(input: Array, num_lower: int, num_upper: int) -> Array:
    """`tf.linalg.band_part`: zeros outside of the diagonals; -1 keeps all of one side."""
    rows, columns = (jnp.arange(size) for size in input.shape[-2:])
    above = columns - rows[:, None]
    keeps_lower = (num_lower < 0) | (-above <= num_lower)
    keeps_upper = (num_upper < 0) | (above <= num_upper)
    return jnp.where(keeps_lower & keeps_upper, input, jnp.zeros((), input.dtype))


def svd(
    tensor: Array, full_matrices: bool = False, compute_uv: bool = True
) -> Array | tuple[Array, Array, Array]:
    """`tf.linalg.svd`: singular values, and the vectors as columns."""
    if not compute_uv:
        return jnp.linalg.svd(tensor, compute_uv=False)
    u, s, vh = jnp.linalg.svd(tensor, full_matrices)
    return s, u, vh.mT.conj()


def solve(matrix: Array, rhs: Array, adjoint: bool = False) -> Array:
    """`tf.linalg.solve`."""
    return jnp.linalg.solve(matrix.mT.conj() if adjoint else matrix, rhs)


def inv(input: Array, adjoint: bool = False) -> Array:
    """`tf.linalg.inv`."""
    return jnp.linalg.inv(input.mT.conj() if adjoint else input)


def diag(diagonal: Array) -> Array:
    """`tf.linalg.diag`: matrices with these diagonals."""
    return diagonal[..., None] * jnp.eye(diagonal.shape[-1], dtype=diagonal.dtype)


def diag_part(input: Array) -> Array:
    """`tf.linalg.diag_part`: the main diagonals."""
    return jnp.diagonal(input, axis1=-2, axis2=-1)


def trace(x: Array) -> Array:
    """`tf.linalg.trace`."""
    return jnp.trace(x, axis1=-2, axis2=-1)


#: Operations with the arguments of JAX.
OF_JAX = {
    **taking(named(jnp.linalg, "cholesky det qr slogdet"), "input"),
    "eigh": Operation(jnp.linalg.eigh, "tensor"),
    "pinv": Operation(jnp.linalg.pinv, "a"),
}
