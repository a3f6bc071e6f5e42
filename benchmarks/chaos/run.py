"""One run: everything is brought up, the faults come, the jobs end, and the verdict is given."""

from __future__ import annotations

import datetime as dt
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import NullPool, create_engine, func, select, update

from benchmarks.chaos import ledger as ledger_tables
from benchmarks.chaos.database import Database
from benchmarks.chaos.enqueuers import Enqueuers
from benchmarks.chaos.evidence import connected, read_database, read_ledger, worker_errors
from benchmarks.chaos.faults import Faults
from benchmarks.chaos.fleet import Fleet
from benchmarks.chaos.ledger import VARIABLE, Ledger
from benchmarks.chaos.schedule import schedule
from benchmarks.chaos.verdict import FINAL, Line, judge
from sa_jobs.models import DEFAULT_TABLES
from tests.support.postgres import Cluster


@dataclass(frozen=True)
class Periods:
    """A worker's times in seconds."""

    lease: float
    heartbeat: float
    sweep: float
    poll: float
    grace: float
    answer: float

    @property
    def options(self) -> list[str]:
        """The options of the command that set them."""
        return [f"--{name}={seconds:g}" for name, seconds in vars(self).items()]

    @property
    def restart(self) -> float:
        """Within how long the jobs of a killed worker start again: its lease, and a sweep."""
        return self.lease + self.sweep


WORKERS = 3

# Within how long workers work again once the database is back.
RESUME_SECONDS = 15.0
# How long nothing may happen at the end of a run before what is left counts as stuck.
_PATIENCE_SECONDS = 20.0
_WAIT_SECONDS = 3.0

PERIODS = {
    "short": Periods(lease=3, heartbeat=1, sweep=1, poll=0.5, grace=5, answer=2),
    "default": Periods(lease=30, heartbeat=10, sweep=10, poll=1, grace=30, answer=10),
}


@dataclass(frozen=True)
class Run:
    """What was asked for."""

    seconds: float
    seed: str
    periods: Periods
    workers: int
    concurrency: int
    enqueuers: int
    rate: float
    kinds: tuple[str, ...]
    programs: Path
    logs: Path
    allowance: float


def chaos(run: Run) -> list[Line]:
    """Make one run, and return its verdict. It leaves nothing running, however it ends."""
    began = time.monotonic()

    def tell(what: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {what}", flush=True)

    lease = run.periods.lease
    faults = schedule(run.seed, run.seconds, workers=run.workers, lease=lease, kinds=run.kinds)
    tell(f"seed {run.seed}, {len(faults)} faults in {run.seconds:g} s; {run.periods}")
    with ExitStack() as stack:
        ledger_url = _open_ledger(stack.enter_context(Cluster(run.programs)))
        ledger = Ledger(ledger_url)
        database = stack.enter_context(Database(run.programs))
        fleet = stack.enter_context(
            Fleet(
                run.workers,
                database.url("chaos handler"),
                {VARIABLE: ledger_url},
                [*run.periods.options, f"--concurrency={run.concurrency}"],
                run.logs,
            )
        )
        fleet.wait_until_ready()
        enqueuers = stack.enter_context(
            Enqueuers(
                run.enqueuers,
                database.url("chaos enqueuer"),
                ledger_url,
                seed=run.seed,
                rate=run.rate,
                lease=lease,
            )
        )
        acting = Faults(database, fleet, enqueuers, ledger, tell)
        acting.run(faults, run.seconds)
        tell(f"faults done: {', '.join(f'{n} {kind}' for kind, n in sorted(acting.done.items()))}")
        codes = enqueuers.stop()
        _let_end(database, fleet, patience=_PATIENCE_SECONDS + 2 * run.periods.restart)
        tell("the workers drain")
        fleet.end()
        with connected(database.direct_url) as there, connected(ledger_url) as here:
            told, noted = read_database(there), read_ledger(here)
        (run.logs / "server.log").write_text(database.log())
        evidence = replace(
            told,
            starts=noted.starts,
            transactions=noted.transactions,
            requests=noted.requests,
            deaths=fleet.deaths,
            outages=database.outages,
            unattended=fleet.unattended,
            server_log=database.log(),
            worker_errors=worker_errors(run.logs),
            enqueuer_codes=codes,
            harness_errors=acting.errors,
        )
        tell("the end")
    return judge(
        evidence,
        restart_seconds=run.periods.restart + run.allowance,
        resume_seconds=RESUME_SECONDS + run.allowance,
    )


def _open_ledger(cluster: Cluster) -> str:
    engine = create_engine(cluster.url(), poolclass=NullPool)
    ledger_tables.metadata.create_all(engine)
    return cluster.url()


def _let_end(database: Database, fleet: Fleet, *, patience: float) -> None:
    """Wait until every job has ended, or nothing has begun or ended for so many seconds.

    What waits for its back-off, which may be minutes, is let go after a few of them.
    """
    jobs = DEFAULT_TABLES.jobs
    waits_for_long = (jobs.c.status == "ready") & (
        jobs.c.run_at > func.now() + dt.timedelta(seconds=_WAIT_SECONDS)
    )
    look = select(
        func.count().filter(jobs.c.status.not_in(FINAL)).label("left"), func.sum(jobs.c.claim_no)
    )
    last_seen, changed_at = None, time.monotonic()
    engine = create_engine(database.direct_url, poolclass=NullPool)
    while time.monotonic() < changed_at + patience and not fleet.exhausted:
        with engine.begin() as connection:
            connection.execute(update(jobs).where(waits_for_long).values(run_at=func.now()))
            seen = connection.execute(look).one()
        if seen.left == 0:
            return
        if seen != last_seen:
            last_seen, changed_at = seen, time.monotonic()
        time.sleep(0.3)
