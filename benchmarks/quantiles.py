"""Medians, percentiles and ratios of repeated measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share (0 to 1) of the values do not exceed."""
    if not values:
        raise ValueError("there are no values to take a percentile of")
    ordered = sorted(values)
    # Rounded first: 0.07 * 100 is a little more than 7.
    rank = math.ceil(round(share * len(ordered), 9))
    return ordered[min(len(ordered), max(1, rank)) - 1]


def spread(seconds: Sequence[float]) -> str:
    """Return the median and the longest of waits, in words."""
    return f"p50 {percentile(seconds, 0.5) * 1000:.1f} ms, longest {max(seconds) * 1000:.1f} ms"


def median_ratio(values: Sequence[float], references: Sequence[float]) -> float:
    """Return the median of the ratios of measurements that were made side by side.

    On a machine whose disk changes its speed by the minute, that says more than the ratio of the
    medians.
    """
    return median(value / reference for value, reference in zip(values, references, strict=True))


def rate_between(times: Sequence[float], start: float, end: float) -> float:
    """Return the events per second between two shares (0 to 1) of a sorted list of their times."""
    last = len(times) - 1
    first, final = round(start * last), round(end * last)
    seconds = times[final] - times[first]
    if final <= first or seconds <= 0:
        raise ValueError(f"{len(times)} times are too few, or too close, for a rate between them")
    return (final - first) / seconds
