"""How much memory a worker may hold, without a job and after some."""

from __future__ import annotations

import pytest

from sa_jobs import WorkerOptionError
from sa_jobs.worker.allowance import MIB, Allowance, resident_mib


def test_memory_that_grows_without_a_job_is_an_error_and_after_one_the_end() -> None:
    limit = resident_mib() + 50
    idle = Allowance(max_jobs=None, max_memory_mib=limit)
    busy = Allowance(max_jobs=None, max_memory_mib=limit)
    idle.check()
    held = b"x" * (150 * MIB)

    with pytest.raises(WorkerOptionError, match="before its first job: give it more"):
        idle.is_used_up()
    busy.spend(1)
    assert busy.is_used_up()
    assert busy.room(5) == 0
    del held


def test_there_is_room_for_the_jobs_that_are_left() -> None:
    allowance = Allowance(max_jobs=3, max_memory_mib=None)
    assert allowance.room(8) == 3
    allowance.spend(2)
    assert (allowance.room(8), allowance.is_used_up()) == (1, False)
    allowance.spend(1)
    assert (allowance.room(8), allowance.is_used_up()) == (0, True)
