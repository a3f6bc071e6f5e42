"""CPU time and memory of the measured processes, and what the rest of the machine took."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

from benchmarks.server import Server

MIB = 2**20


@dataclass(frozen=True)
class Used:
    """CPU seconds of workers and server, and the cores that other processes kept busy."""

    seconds: float
    workers: float
    server: float
    others: float

    def per_job(self, jobs: int) -> str:
        """Return the CPU time of each part in words."""
        return (
            f"CPU per job: worker {self.workers / jobs * 1e6:.0f} us, "
            f"server {self.server / jobs * 1e6:.0f} us; other processes {self.others:.2f} cores"
        )


class Meter:
    """Takes the CPU time from its making to `read()`."""

    def __init__(self, server: Server, workers: Sequence[int] = ()) -> None:
        self._server = server
        self._workers = workers
        self._began = self._now()

    def read(self) -> Used:
        """Return what was used so far; the workers must still run."""
        # The postmaster counts a backend's time only once it has seen its end.
        time.sleep(0.1)
        moment, busy, own, workers, server = (
            end - start for start, end in zip(self._began, self._now(), strict=True)
        )
        others = max(0.0, busy - own - workers - server) / moment
        return Used(moment, workers, server, others)

    def _now(self) -> tuple[float, float, float, float, float]:
        machine = psutil.cpu_times()
        busy = sum(
            getattr(machine, kind, 0.0) for kind in ("user", "system", "nice", "irq", "softirq")
        )
        workers = sum(_cpu(psutil.Process(pid)) for pid in self._workers)
        return time.monotonic(), busy, _cpu(psutil.Process()), workers, self._server_cpu()

    def _server_cpu(self) -> float:
        pid = self._server.cluster.pid
        assert pid is not None
        postmaster = psutil.Process(pid)
        backends = 0.0
        for backend in postmaster.children():
            try:
                times = backend.cpu_times()
            except psutil.Error:
                continue  # It has just ended, and is counted with the postmaster's children.
            backends += times.user + times.system
        return _cpu(postmaster) + backends


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def memory(pids: Iterable[int]) -> float:
    """Return the resident memory of processes, in MiB."""
    return float(sum(psutil.Process(pid).memory_info().rss for pid in pids) / MIB)
