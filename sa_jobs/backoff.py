"""Pure policies: the number of a failed attempt (from 1) to the seconds until the next one.

Every policy's delay is finite and within [0, cap] for any attempt number: the exponent is
clamped before the power is taken, since `2.0 ** 1024` raises OverflowError.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
import random
from collections.abc import Callable

from sa_jobs.limits import MAX_DELAY_SECONDS, check_seconds

Backoff = Callable[[int], float]
Seconds = float | dt.timedelta

DEFAULT_BASE_SECONDS = 2.0
DEFAULT_CAP_SECONDS = 300.0
_MAX_EXPONENT = 512

logger = logging.getLogger("sa_jobs.backoff")


class _Exponential:
    def __init__(self, base: Seconds, cap: Seconds) -> None:
        self.base = check_seconds("base", base)
        self.cap = check_seconds("cap", cap)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(base={self.base:g}, cap={self.cap:g})"

    def ceiling(self, exponent: int) -> float:
        return min(self.cap, self.base * 2.0 ** min(max(exponent, 0), _MAX_EXPONENT))


class full_jitter(_Exponential):  # noqa: N801 - reads as a function where policies are declared
    """Return uniform(0, min(cap, base * 2^(n-1))) seconds: a burst spreads over all of it."""

    def __init__(
        self, base: Seconds = DEFAULT_BASE_SECONDS, cap: Seconds = DEFAULT_CAP_SECONDS
    ) -> None:
        super().__init__(base, cap)

    def __call__(self, attempt: int) -> float:
        return random.uniform(0.0, self.ceiling(attempt - 1))


class equal_jitter(_Exponential):  # noqa: N801
    """Return min(cap, base * 2^n * uniform(0.5, 1.5)) seconds: jittered, but never near zero."""

    def __init__(
        self, base: Seconds = DEFAULT_BASE_SECONDS, cap: Seconds = DEFAULT_CAP_SECONDS
    ) -> None:
        super().__init__(base, cap)

    def __call__(self, attempt: int) -> float:
        uncapped = self.base * 2.0 ** min(max(attempt, 0), _MAX_EXPONENT)
        return min(self.cap, uncapped * (0.5 + random.random()))


class exponential(_Exponential):  # noqa: N801
    """Return min(cap, 2^n) seconds, without jitter: a burst of failures returns in one wave."""

    def __init__(self, cap: Seconds = DEFAULT_CAP_SECONDS) -> None:
        super().__init__(1.0, cap)

    def __call__(self, attempt: int) -> float:
        return self.ceiling(attempt)


class fixed(_Exponential):  # noqa: N801
    """Return the same number of seconds after every attempt."""

    def __init__(self, seconds: Seconds) -> None:
        super().__init__(seconds, seconds)

    def __call__(self, attempt: int) -> float:
        return self.cap


DEFAULT_BACKOFF: Backoff = full_jitter()

_reported: set[int] = set()


def delay_after(policy: Backoff, attempt: int) -> float:
    """Return the policy's delay after this failed attempt, as finite seconds that are not negative.

    A callable that raises, or returns anything but such a number, is replaced by the default
    policy for this call; that is logged once for each callable.
    """
    try:
        seconds = policy(attempt)
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if is_number and 0 <= seconds < math.inf:
            return float(min(seconds, MAX_DELAY_SECONDS))
        problem = f"returned {seconds!r:.100}"
    except BaseException as error:
        problem = f"raised {type(error).__name__}"
    if id(policy) not in _reported:
        _reported.add(id(policy))
        name = getattr(policy, "__qualname__", type(policy).__qualname__)
        logger.error("backoff %s %s; the default policy is used in its place", name, problem)
    return DEFAULT_BACKOFF(attempt)
