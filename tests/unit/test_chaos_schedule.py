"""The schedule of faults in `benchmarks.chaos`."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.chaos.schedule import CLIENTS, KINDS, Fault, schedule

MINUTE = 60.0
OF_THE_DATABASE = ("delay", "refuse", "fast restart", "immediate restart", "failover")


def drawn(seed: str = "1", seconds: float = 10 * MINUTE, workers: int = 3) -> list[Fault]:
    return schedule(seed, seconds, workers=workers, lease=3.0)


def test_the_same_seed_gives_the_same_faults() -> None:
    assert drawn("7") == drawn("7")
    assert drawn("7") != drawn("8")


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_every_kind_comes_again_and_again(seed: str) -> None:
    kinds = [fault.kind for fault in drawn(seed)]
    assert set(kinds[: 2 * len(KINDS)]) == set(KINDS)
    assert min(kinds.count(kind) for kind in KINDS if kind != "failover") >= 3
    assert 1 <= kinds.count("failover") <= 5
    assert {fault.client for fault in drawn(seed)} == set(CLIENTS)


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_all_faults_are_over_when_the_run_is(seed: str) -> None:
    faults = drawn(seed, 30.0)
    assert faults == sorted(faults, key=lambda fault: fault.at)
    assert all(fault.at > 0 and fault.at + fault.seconds <= 30.0 for fault in faults)


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_the_database_has_one_fault_at_a_time_and_then_some_peace(seed: str) -> None:
    faults = [fault for fault in drawn(seed) if fault.kind in OF_THE_DATABASE]
    assert all(two.at - (one.at + one.seconds) > 2.0 for one, two in pairwise(faults))


@pytest.mark.parametrize("seed", ["1", "2", "3"])
@pytest.mark.parametrize("workers", [2, 3])
def test_one_worker_at_least_is_not_frozen(seed: str, workers: int) -> None:
    freezes = [fault for fault in drawn(seed, workers=workers) if fault.kind == "freeze worker"]
    assert freezes
    assert all(fault.seconds > 3.0 for fault in freezes), "the lease must lapse"
    for fault in freezes:
        frozen = [one.target for one in freezes if one.at <= fault.at < one.at + one.seconds]
        assert len(set(frozen)) == len(frozen) < workers


def test_kinds_can_be_left_out() -> None:
    faults = schedule("1", 5 * MINUTE, workers=3, lease=3.0, kinds=("kill worker", "failover"))
    assert {fault.kind for fault in faults} == {"kill worker", "failover"}
    assert schedule("1", MINUTE, workers=1, lease=3.0, kinds=("freeze worker",)) == []
