"""For processes whose clock libfaketime shifts: loaded by every Python that has it on its path.

Python sleeps until a monotonic time, and libfaketime (0.9.10) refuses that unless it fakes the
monotonic clock too. Other waits do not go through it.
"""

import threading
import time


def _sleep(seconds: float, /) -> None:
    threading.Event().wait(seconds)


setattr(time, "sleep", _sleep)  # noqa: B010 - to mypy a function is no variable
