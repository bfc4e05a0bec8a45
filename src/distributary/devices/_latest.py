"""The program that this process has dispatched last."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any, final

from distributary.devices._timing import Output, ProgramTimer, wait_for_output


@final
@dataclass(eq=False)
class LatestProgram:
    """The program that was dispatched last in this process.

    Attributes:
        count: Number of programs dispatched so far.
        output: An array that the program makes, a list with one per replica, or None.
        lock: Held while a program that may consume that array is dispatched.
        dispatched_at: Time at which it had been dispatched, by `time.perf_counter`.
        blocked_seconds: Time that dispatches have waited for earlier programs so far.
        timer: Timer of programs, while a step is a sample.
    """

    count: int = 0
    output: Output = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    dispatched_at: float = 0.0
    blocked_seconds: float = 0.0
    timer: ProgramTimer | None = None

    def wait(self) -> None:
        """Waits until the devices have finished it."""
        with self.lock:
            wait_for_output(self.output)

    def begin(self) -> None:
        """Starts the timer if there is one; call it before a program is dispatched."""
        timer = self.timer
        if timer is not None and timer.is_over:
            self.timer = None
        elif timer is not None:
            self.blocked_seconds += timer.start(self.output)

    def end(self, output: Output, result: Output) -> None:
        """Records a program; call it after the program was dispatched.

        Args:
            output: An array that the program makes, a list with one per replica, or None.
            result: The same, but of outputs that no later program consumes, if there are any.
        """
        self.count += 1
        self.output = output
        timer = self.timer
        if timer is not None:
            self.blocked_seconds += timer.stop(output if result is None else result)
        self.dispatched_at = time.perf_counter()

    def is_running(self) -> bool:
        """Returns whether the devices are still at work on it."""
        # jaxlib 0.10.2 ends the process if you ask a deleted array whether it is ready.
        with self.lock:
            output: Any = self.output[0] if isinstance(self.output, list) else self.output
            if not hasattr(output, "is_ready"):  # nothing, or a random key
                return False
            return not output.is_deleted() and not output.is_ready()


latest_program = LatestProgram()
