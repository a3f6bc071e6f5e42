"""The verdict: what must hold after any run, each with what was found against it. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.chaos.application import MAY_DIE, POISON, POISON_CODE, TRANSACTIONAL
from benchmarks.chaos.evidence import Evidence, Failure, Job, Period
from benchmarks.chaos.serverlog import deadlocks, unexpected

FINAL = ("done", "dead", "cancelled")
LAPSED = "lease expired"

# The longest time between two tries of a worker whose database is away.
BACK_OFF_SECONDS = 5.0


@dataclass(frozen=True)
class Line:
    """A line of the table: a figure, what it must be if anything, and the reasons against it."""

    what: str
    found: str
    must: str = ""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Restart:
    """How long a job was interrupted that ran in a worker which was killed.

    `seconds` are from the worker's end to the job's next claim, in which its handler starts unless
    that worker is killed too; `net` of them, there were a database and a worker. From the second
    lapse in a row on, jobs wait on purpose.
    """

    seconds: float
    net: float
    in_a_row: bool


def judge(evidence: Evidence, *, restart_seconds: float, resume_seconds: float) -> list[Line]:
    """Return the table.

    95 of 100 interrupted jobs must start again within `restart_seconds`, and handlers within
    `resume_seconds` of the end of an outage.
    """
    states = Counter(job.status for job in evidence.jobs)
    outcomes = Counter(transaction.outcome for transaction in evidence.transactions)
    causes = Counter(_causes(evidence).values())
    figures = [
        Line("transactions committed", str(outcomes["committed"])),
        Line("transactions rolled back", str(outcomes["rolled back"])),
        Line("commits without an answer", str(outcomes["unknown"])),
        Line("jobs enqueued", str(len(evidence.jobs))),
        *(Line(f"jobs {state}", str(states[state])) for state in FINAL),
        Line("starts of handlers", str(len(evidence.starts))),
        Line("claims given back", str(_given_back(evidence))),
        Line("leases that lapsed", str(sum(map(_is_lapse, evidence.failures)))),
        Line("workers killed", str(causes["killed"])),
        Line("workers killed by their job", str(causes["poison"])),
        Line("workers drained", str(causes["drained"])),
        Line("workers hindered from handing all back", str(causes["hindered"])),
    ]
    checks: list[tuple[str, Callable[[Evidence], Iterable[str]]]] = [
        ("signs that nothing happened", idle),
        ("jobs lost", lost),
        ("jobs of no transaction", stray),
        ("jobs stuck", stuck),
        ("effects twice (transactional)", effects_twice),
        ("effects without a finish (transactional)", effects_alone),
        ("done without an effect", done_alone),
        ("finished by a claim that was over", finished_late),
        ("starts beyond attempts", starts_beyond),
        ("attempts without an outcome", attempts_unexplained),
        ("dead without a cause", dead_without_cause),
        ("cancelled by nobody", cancelled_by_nobody),
        ("deadlocks", deadlocked),
        ("unexpected errors in the server's log", _server_errors),
        ("errors in the workers' logs", lambda found: found.worker_errors),
        ("workers that died by themselves", died_by_themselves),
        ("enqueuers that died by themselves", _enqueuers_died),
        ("faults that the harness could not do", lambda found: found.harness_errors),
    ]
    return [
        *figures,
        *_resumption_lines(evidence, resume_seconds),
        *_restart_lines(evidence, restart_seconds),
        *_zero(evidence, checks),
    ]


def holds(lines: Iterable[Line]) -> bool:
    """Return whether there is no reason against any line."""
    return not any(line.reasons for line in lines)


def idle(evidence: Evidence) -> list[str]:
    """Return what is missing of a run that could show anything."""
    seen = {
        "no transaction was committed": any(
            transaction.outcome == "committed" for transaction in evidence.transactions
        ),
        "no job is done": any(job.status == "done" for job in evidence.jobs),
        "no handler started": bool(evidence.starts),
    }
    return [what for what, was_seen in seen.items() if not was_seen]


def restarts(evidence: Evidence) -> list[Restart]:
    """Return the interruptions by a kill.

    Left out are jobs that were not to start again, or not so soon: those out of attempts, and those
    that somebody asked to cancel or retry.
    """
    causes = _causes(evidence)
    killed = {
        death.pid: death.at
        for death in evidence.deaths
        if causes[death.pid] in ("killed", "poison")
    }
    claims: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for start in evidence.starts:
        claims[start.job_id].append((start.claim_no, start.at))
    for failure in evidence.failures:
        # Of a claim whose worker was killed before the handler could start, there is no start.
        claims[failure.job_id].append((failure.claim_no, failure.claimed_at))
    asked = {request.job_id for request in evidence.requests}
    outages = merged([*map(_with_back_off, evidence.outages), *evidence.unattended])
    found: list[Restart] = []
    lapsed_last: dict[int, bool] = {}
    for failure in evidence.failures:
        in_a_row = lapsed_last.get(failure.job_id, False)
        lapsed_last[failure.job_id] = _is_lapse(failure)
        ended_at = killed.get(_pid(failure.worker))
        if not _is_lapse(failure) or ended_at is None or failure.job_id in asked:
            continue
        later = [at for claim_no, at in claims[failure.job_id] if claim_no > failure.claim_no]
        if later:
            seconds = min(later) - ended_at
            away = _overlap(outages, ended_at, min(later))
            found.append(Restart(seconds, seconds - away, in_a_row))
    return found


def resumptions(evidence: Evidence) -> list[float]:
    """Return for each outage the seconds until a handler started again, once there was a worker."""
    starts = [start.at for start in evidence.starts]
    unattended = merged(evidence.unattended)
    found = []
    for _, until in merged(evidence.outages):
        position = bisect_left(starts, until)
        if position < len(starts):
            at = starts[position]
            found.append(at - until - _overlap(unattended, until, at))
    return found


def merged(periods: Iterable[Period]) -> list[Period]:
    """Return the periods that cover the same time and do not overlap."""
    found: list[Period] = []
    for since, until in sorted(periods):
        if found and since <= found[-1][1]:
            found[-1] = (found[-1][0], max(until, found[-1][1]))
        else:
            found.append((since, until))
    return found


def p95(values: Sequence[float]) -> float:
    """Return what 95 of 100 of the values do not exceed; 0 if there are none."""
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * 0.95) - 1] if ordered else 0.0


# --- what must not be ---------------------------------------------------------------------------


def lost(evidence: Evidence) -> Iterator[str]:
    """Yield the orders that were acknowledged and are absent, and jobs that their orders miss."""
    placed = {order.token: order for order in evidence.orders}
    jobs = {job.id: job for job in evidence.jobs}
    for transaction in evidence.transactions:
        if transaction.outcome != "committed":
            continue
        order = placed.get(transaction.token)
        if order is None:
            yield f"order {transaction.token}: its commit was acknowledged, and it is absent"
            continue
        for job_id in transaction.job_ids:
            if job_id not in jobs or jobs[job_id].order != order.name:
                yield f"job {job_id} of order {order.name}: enqueued and absent"
    there = Counter(job.order for job in evidence.jobs)
    for name, number in _jobs_ordered(evidence).items():
        if there[name] < number:
            yield f"order {name}: {there[name]} jobs of {number}"


def stray(evidence: Evidence) -> Iterator[str]:
    """Yield the orders that were rolled back and are there, and jobs beyond those ordered."""
    placed = {order.token for order in evidence.orders}
    for transaction in evidence.transactions:
        if transaction.outcome == "rolled back" and transaction.token in placed:
            yield f"order {transaction.token}: rolled back, and it is there"
    ordered = _jobs_ordered(evidence)
    for name, number in Counter(job.order for job in evidence.jobs).items():
        if number > ordered.get(name, 0):
            yield f"order {name}: {number} jobs, and {ordered.get(name, 0)} were ordered"


def stuck(evidence: Evidence) -> Iterator[str]:
    """Yield the jobs that did not end although nothing hindered them any more."""
    for job in evidence.jobs:
        if job.status not in FINAL:
            yield f"{_name(job)} is {job.status} at attempt {job.attempts}"


def effects_twice(evidence: Evidence) -> Iterator[str]:
    """Yield the jobs of transactional handlers that have two effects."""
    number = Counter(effect.job_id for effect in evidence.effects)
    for job in _transactional(evidence):
        if number[job.id] > 1:
            yield f"{_name(job)} has {number[job.id]} effects"


def effects_alone(evidence: Evidence) -> Iterator[str]:
    """Yield the effects of transactional handlers that were committed without a finish."""
    transactional = {job.id: job for job in _transactional(evidence)}
    for effect in evidence.effects:
        job = transactional.get(effect.job_id)
        if job is not None and (job.status != "done" or effect.claim_no != job.claim_no):
            yield (
                f"{_name(job)} is {job.status} at claim {job.claim_no}, "
                f"and has an effect of claim {effect.claim_no}"
            )


def done_alone(evidence: Evidence) -> Iterator[str]:
    """Yield the jobs that are done and have no effect."""
    having = {effect.job_id for effect in evidence.effects}
    for job in evidence.jobs:
        if job.status == "done" and job.id not in having:
            yield f"{_name(job)} is done, and has no effect"


def finished_late(evidence: Evidence) -> Iterator[str]:
    """Yield the jobs that were finished by another claim than their last."""
    for job in evidence.jobs:
        if job.status == "done" and job.result != job.claim_no:
            yield f"{_name(job)} was finished by claim {job.result}; its last is {job.claim_no}"


def starts_beyond(evidence: Evidence) -> Iterator[str]:
    """Yield the starts that the attempts of their jobs do not allow.

    A claim counts an attempt and starts the handler at most once. Snoozing and handing back take
    the attempt back, but never the claim's number.
    """
    jobs = {job.id: job for job in evidence.jobs}
    seen: set[tuple[int, int]] = set()
    for start in evidence.starts:
        job = jobs.get(start.job_id)
        if job is None:
            yield f"job {start.job_id}: started, and it does not exist"
            continue
        if (start.job_id, start.claim_no) in seen:
            yield f"{_name(job)}: claim {start.claim_no} was started twice"
        seen.add((start.job_id, start.claim_no))
        if start.claim_no > job.claim_no:
            yield f"{_name(job)}: claim {start.claim_no} was started; its last is {job.claim_no}"
        if start.attempt > job.max_attempts:
            yield f"{_name(job)}: attempt {start.attempt} of {job.max_attempts} was started"


def attempts_unexplained(evidence: Evidence) -> Iterator[str]:
    """Yield the jobs whose attempts are not those that failed and the one that was done.

    Those that somebody retried begin to count anew.
    """
    failed = Counter(failure.job_id for failure in evidence.failures)
    retried = _asked(evidence, "retry")
    for job in evidence.jobs:
        if job.status in FINAL and job.id not in retried:
            explained = failed[job.id] + (job.status == "done")
            if job.attempts != explained:
                yield f"{_name(job)} is {job.status}: {job.attempts} attempts, {explained} outcomes"


def dead_without_cause(evidence: Evidence) -> Iterator[str]:
    """Yield the dead jobs whose handlers do not fail, or that had attempts left."""
    for job in evidence.jobs:
        if job.status == "dead" and (job.handler not in MAY_DIE or job.attempts < job.max_attempts):
            yield f"{_name(job)} is dead at attempt {job.attempts} of {job.max_attempts}"


def cancelled_by_nobody(evidence: Evidence) -> Iterator[str]:
    """Yield the cancelled jobs that nobody asked to cancel."""
    asked = _asked(evidence, "cancel")
    for job in evidence.jobs:
        if job.status == "cancelled" and job.id not in asked:
            yield f"{_name(job)} is cancelled"


def deadlocked(evidence: Evidence) -> Iterator[str]:
    """Yield the deadlocks; the server's log knows of those before a crash too."""
    logged = [f"{entry.session}: {entry.message}" for entry in deadlocks(evidence.server_log)]
    yield from logged
    if evidence.deadlocks > len(logged):
        yield f"the server counts {evidence.deadlocks}"


def died_by_themselves(evidence: Evidence) -> Iterator[str]:
    """Yield the workers that neither a fault nor their job has ended."""
    causes = _causes(evidence)
    for death in evidence.deaths:
        if causes[death.pid] == "itself":
            yield f"worker {death.pid}: exit code {death.code}"


def _server_errors(evidence: Evidence) -> Iterator[str]:
    for entry in unexpected(evidence.server_log):
        yield f"{entry.state} {entry.session}: {entry.level}: {entry.message}"


def _enqueuers_died(evidence: Evidence) -> Iterator[str]:
    for code in evidence.enqueuer_codes:
        if code != 0:
            yield f"exit code {code}"


# --- pieces -------------------------------------------------------------------------------------


def _resumption_lines(evidence: Evidence, limit: float) -> Iterator[Line]:
    longest = max(resumptions(evidence), default=0.0)
    yield Line("outages of the database", str(len(merged(evidence.outages))))
    yield Line(
        "  end of an outage to a start, longest",
        f"{longest:.2f} s",
        f"at most {limit:g} s",
        (f"{longest:.2f} s",) if longest > limit else (),
    )


def _restart_lines(evidence: Evidence, limit: float) -> Iterator[Line]:
    found = restarts(evidence)
    first = [restart.seconds for restart in found if not restart.in_a_row]
    net = [restart.net for restart in found if not restart.in_a_row]
    yield Line("jobs interrupted by a kill", str(len(found)))
    yield Line("  not for the first time in a row: they wait", str(len(found) - len(first)))
    yield Line("  others, crash to restart, longest", f"{max(first, default=0):.2f} s")
    yield Line("  others, crash to restart, p95", f"{p95(first):.2f} s")
    yield Line("    with a database and a worker, longest", f"{max(net, default=0):.2f} s")
    yield Line(
        "    with a database and a worker, p95",
        f"{p95(net):.2f} s",
        f"at most {limit:g} s",
        (f"{p95(net):.2f} s",) if p95(net) > limit else (),
    )


def _zero(
    evidence: Evidence, checks: Sequence[tuple[str, Callable[[Evidence], Iterable[str]]]]
) -> Iterator[Line]:
    for what, check in checks:
        reasons = tuple(check(evidence))
        yield Line(what, str(len(reasons)), "0", reasons)


def _causes(evidence: Evidence) -> dict[int, str]:
    handlers = {job.id: job.handler for job in evidence.jobs}
    poisoned = {start.pid for start in evidence.starts if handlers.get(start.job_id) == POISON}
    return {
        death.pid: "poison" if death.code == POISON_CODE and death.pid in poisoned else death.cause
        for death in evidence.deaths
    }


def _transactional(evidence: Evidence) -> Iterator[Job]:
    return (job for job in evidence.jobs if job.handler in TRANSACTIONAL)


def _jobs_ordered(evidence: Evidence) -> dict[str, int]:
    """Return by the order's name how many jobs there must be: twins share theirs, by their keys."""
    ordered: dict[str, int] = {}
    for order in evidence.orders:
        ordered[order.name] = max(order.jobs, ordered.get(order.name, 0))
    return ordered


def _given_back(evidence: Evidence) -> int:
    retried = _asked(evidence, "retry")
    return sum(job.claim_no - job.attempts for job in evidence.jobs if job.id not in retried)


def _asked(evidence: Evidence, what: str) -> set[int]:
    return {request.job_id for request in evidence.requests if request.what == what}


def _is_lapse(failure: Failure) -> bool:
    return failure.error.startswith(LAPSED)


def _pid(worker: str | None) -> int:
    """Return the process id that a worker's id names: host:pid:random. 0 if there is none."""
    parts = (worker or "").split(":")
    return int(parts[-2]) if len(parts) >= 3 else 0


def _with_back_off(outage: Period) -> Period:
    # A worker tries again ever more rarely: after as long as it has tried, and no longer than this.
    since, until = outage
    return since, until + min(BACK_OFF_SECONDS, until - since)


def _overlap(periods: Iterable[Period], start: float, end: float) -> float:
    return sum(max(0.0, min(end, until) - max(start, since)) for since, until in periods)


def _name(job: Job) -> str:
    return f"job {job.id} {job.handler}"
