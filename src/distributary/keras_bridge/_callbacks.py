"""A list of callbacks that costs nothing at steps no callback looks at."""

from collections.abc import Callable
from typing import Any

from keras.src.utils import is_default


def make_callback_list(base: type, strategy_of: Callable[[Any], Any]) -> type:
    """A stand-in for Keras' `CallbackList`: a leaner one for models under a strategy."""

    def wanted(callback: Any, *names: str) -> bool:
        return any(not is_default(getattr(callback, name)) for name in names)

    class LeanCallbackList(base):
        """Calls per-batch hooks only if some callback has them.

        Keras starts a thread's task for every batch to convert logs nobody asked for.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._answers: dict[Any, bool] = {}
            super().__init__(*args, **kwargs)

        def _asks(self, *names: str) -> bool:
            key = (*names, len(self.callbacks))
            answer: bool | None = self._answers.get(key)
            if answer is None:
                answer = any(wanted(callback, *names) for callback in self.callbacks)
                self._answers[key] = answer
            return answer

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self._asks("on_train_batch_begin", "on_batch_begin"):
                super().on_train_batch_begin(batch, logs)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self._asks("on_train_batch_end", "on_batch_end"):
                super().on_train_batch_end(batch, logs)

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self._asks("on_test_batch_begin"):
                super().on_test_batch_begin(batch, logs)

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            if self._asks("on_test_batch_end"):
                super().on_test_batch_end(batch, logs)

        def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self._asks("on_predict_batch_begin"):
                super().on_predict_batch_begin(batch, logs)

        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            if self._asks("on_predict_batch_end"):
                super().on_predict_batch_end(batch, logs)

    class Choice(type):
        """Keras both calls the class and asks whether what the user gave is an instance of it."""

        def __call__(cls, *args: Any, model: Any = None, **kwargs: Any) -> Any:
            kind = base if strategy_of(model) is None else LeanCallbackList
            return kind(*args, model=model, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, base)

    return Choice("CallbackList", (), {})
