"""`tf.test`: `TestCase`, with NumPy's comparisons, and derivatives from differences."""

# ruff: noqa: N802, PT009  (methods of unittest)

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl.testing import absltest

from distributary._types import Nest
from distributary.tensorflow._operations import array, plain
from distributary.values import PerReplica

main = absltest.main


def compute_gradient(
    f: Callable[..., Any], x: Sequence[Any], delta: float | None = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Computes the derivatives of a function twice: by differentiation, and from differences.

    Args:
        f: Function of arrays whose result is one array.
        x: Its arguments.
        delta: Step of the differences; None means 1/1024.

    Returns:
        Two lists with a matrix `[size of the result, size of the argument]` for each argument.

    Source: `tf.test.compute_gradient`.
    """
    arguments = [array(one) for one in x]
    step = 1.0 / 1024 if delta is None else delta
    by_rule, by_differences = [], []
    for number, argument in enumerate(arguments):

        def of_one(value: object, number: int = number) -> Any:
            return array(f(*arguments[:number], value, *arguments[number + 1 :])).reshape(-1)

        jacobian = jax.jacobian(of_one)(argument)
        by_rule.append(np.asarray(jacobian).reshape(jacobian.shape[0], argument.size))
        shifts = step * np.eye(argument.size, dtype=argument.dtype)
        columns = [
            (np.asarray(of_one(argument + shift)) - np.asarray(of_one(argument - shift)))
            / (2 * step)
            for shift in shifts.reshape(-1, *argument.shape)
        ]
        by_differences.append(np.stack(columns, axis=1))
    return by_rule, by_differences


class TestCase(absltest.TestCase):
    """Test cases with comparisons of arrays and nests of them.

    Source: `tf.test.TestCase`.
    """

    def get_temp_dir(self) -> str:
        """Returns a folder for the files of the test."""
        return str(self.create_tempdir().full_path)

    def evaluate(self, tensors: Nest) -> Any:
        """Returns arrays as NumPy arrays."""
        return jax.tree.map(lambda leaf: np.asarray(plain(leaf)), tensors, is_leaf=_is_replicas)

    @contextlib.contextmanager
    def cached_session(self, *args: object, **kwargs: object) -> Iterator["TestCase"]:
        """Has no effect; `run` and `eval` of it are `evaluate`."""
        yield self

    session = cached_session

    def assertAllClose(
        self, a: Nest, b: Nest, rtol: float = 1e-6, atol: float = 1e-6, msg: str | None = None
    ) -> None:
        """Compares nests of arrays with a tolerance."""
        self._compare(
            a, b, lambda x, y: np.testing.assert_allclose(x, y, rtol, atol, err_msg=msg or "")
        )

    def assertNotAllClose(
        self, a: Nest, b: Nest, rtol: float = 1e-6, atol: float = 1e-6, msg: str | None = None
    ) -> None:
        """Requires that something differs by more than a tolerance."""
        self._require_unlike(lambda: self.assertAllClose(a, b, rtol, atol), msg)

    def assertAllEqual(self, a: Nest, b: Nest, msg: str | None = None) -> None:
        """Compares nests of arrays."""
        self._compare(a, b, lambda x, y: np.testing.assert_array_equal(x, y, err_msg=msg or ""))

    def assertNotAllEqual(self, a: Nest, b: Nest, msg: str | None = None) -> None:
        """Requires that something differs."""
        self._require_unlike(lambda: self.assertAllEqual(a, b), msg)

    def assertNear(self, f1: Any, f2: Any, err: float, msg: str | None = None) -> None:
        """Compares two numbers."""
        self.assertAlmostEqual(float(f1), float(f2), delta=err, msg=msg)

    def assertArrayNear(
        self, farray1: object, farray2: object, err: float, msg: str | None = None
    ) -> None:
        """Compares rows of numbers."""
        self.assertAllClose(farray1, farray2, 0, err, msg)

    def assertAllGreater(self, a: Any, comparison_target: Any) -> None:
        """Requires that all elements are greater."""
        np.testing.assert_array_less(comparison_target, self.evaluate(a))

    def assertAllLess(self, a: Any, comparison_target: Any) -> None:
        """Requires that all elements are less."""
        np.testing.assert_array_less(self.evaluate(a), comparison_target)

    def assertAllGreaterEqual(self, a: object, comparison_target: object) -> None:
        """Requires that no element is less."""
        self.assertTrue((self.evaluate(a) >= comparison_target).all(), a)

    def assertAllLessEqual(self, a: object, comparison_target: object) -> None:
        """Requires that no element is greater."""
        self.assertTrue((self.evaluate(a) <= comparison_target).all(), a)

    def assertAllInRange(self, target: object, lower_bound: object, upper_bound: object) -> None:
        """Requires that all elements are in a range, with its ends."""
        self.assertAllGreaterEqual(target, lower_bound)
        self.assertAllLessEqual(target, upper_bound)

    def assertAllInSet(self, target: Any, expected_set: Any) -> None:
        """Requires that all elements are among others."""
        self.assertContainsSubset(self.evaluate(target).ravel().tolist(), list(expected_set))

    def assertShapeEqual(self, input_a: Any, input_b: Any, msg: str | None = None) -> None:
        """Compares shapes."""
        self.assertEqual(np.shape(input_a), np.shape(input_b), msg)

    def assertDTypeEqual(self, target: object, expected_dtype: object) -> None:
        """Compares dtypes; a dtype of 64 bits stands for one of 32, as everywhere."""
        wanted = jax.dtypes.canonicalize_dtype(expected_dtype)
        self.assertEqual(jax.dtypes.canonicalize_dtype(plain(target).dtype), wanted)

    def _compare(self, a: Nest, b: Nest, compare: Callable[[Any, Any], None]) -> None:
        first, second = self.evaluate(a), self.evaluate(b)
        if isinstance(first, dict) and isinstance(second, dict):
            self.assertEqual(set(first), set(second))
            for key in first:
                self._compare(first[key], second[key], compare)
        elif isinstance(first, (list, tuple)):
            self.assertEqual(len(first), len(second))
            for x, y in zip(first, second, strict=True):
                self._compare(x, y, compare)
        else:
            compare(first, second)

    def _require_unlike(self, compare: Callable[[], None], msg: str | None) -> None:
        try:
            compare()
        except AssertionError:
            return
        self.fail(msg or "The values are the same, expected different ones.")


def _is_replicas(value: object) -> bool:
    return isinstance(value, PerReplica)
