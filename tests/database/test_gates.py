"""The gates: open while a worker sleeps, shut while notifications come thick and fast."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from sa_jobs import Jobs, presence
from sa_jobs.models import DEFAULT_TABLES
from sa_jobs.worker import gates
from sa_jobs.worker.gates import Gates
from tests.support.gates import holders, open_gates, wait_until_asleep
from tests.support.looking import wait_until_done
from tests.support.running import running
from tests.support.waiting import wait_until

# Longer than any test: what starts was found by a notification, or by looking again soon.
POLL = 60.0


@pytest.fixture
def jobs() -> Jobs:
    jobs = Jobs()
    jobs.handler("noop")(lambda: None)
    return jobs


def add(engine: Engine, jobs: Jobs) -> int:
    with Session(engine) as session, session.begin():
        return jobs.enqueue(session, "noop").id


def test_a_flood_of_notifications_shuts_the_gates_and_the_next_sleep_opens_them(
    engine: Engine, jobs: Jobs
) -> None:
    over = threading.Event()

    def flood() -> None:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            channel = presence.channel_name(connection, DEFAULT_TABLES)
            own = connection.execute(text("SELECT left(encode(sha256('default'), 'hex'), 16)"))
            payload = str(own.scalar_one())
            while not over.is_set():
                presence.notify(connection, channel, payload)

    with running(engine, jobs, poll=POLL):
        wait_until_asleep(engine)
        flooding = threading.Thread(target=flood)
        flooding.start()
        try:
            wait_until(lambda: open_gates(engine) == 0, "the gate is shut")
        finally:
            over.set()
            flooding.join()
        wait_until_asleep(engine)
        wait_until_done(engine, add(engine, jobs))


def test_a_few_notifications_leave_the_gates_open(engine: Engine, jobs: Jobs) -> None:
    with running(engine, jobs, poll=POLL):
        wait_until_asleep(engine)
        holder = holders(engine)
        for _ in range(5):
            wait_until_done(engine, add(engine, jobs))
            assert holders(engine) == holder


def test_what_was_enqueued_before_the_gate_opened_is_found_when_it_commits(
    engine: Engine, jobs: Jobs
) -> None:
    with engine.connect() as host:
        late = jobs.enqueue(host, "noop").id
        with running(engine, jobs, poll=POLL):
            wait_until_asleep(engine)
            host.commit()
            wait_until_done(engine, late)


def test_when_the_worker_that_holds_a_gate_ends_another_one_opens_it(
    engine: Engine, jobs: Jobs
) -> None:
    with ExitStack() as others:
        with running(engine, jobs, poll=POLL):
            wait_until_asleep(engine)
            first = holders(engine)
            others.enter_context(running(engine, jobs, poll=POLL))
            # The second one is asleep too, behind the gate of the first.
            for _ in range(5):
                wait_until_done(engine, add(engine, jobs))
            assert holders(engine) == first
        wait_until_asleep(engine)
        assert holders(engine) != first
        wait_until_done(engine, add(engine, jobs))


def test_gates_are_opened_once_and_relied_on_while_others_hold_them(engine: Engine) -> None:
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with autocommit.connect() as first, autocommit.connect() as second:
        own, others = Gates(["a", "b"], DEFAULT_TABLES), Gates(["b", "c"], DEFAULT_TABLES)
        assert own.open(first)
        assert not own.open(first)
        assert not own.relies
        assert others.open(second)
        assert others.relies
        assert not others.open(second)
        own.shut(first)
        # b may have been shut for a while before it became its own.
        assert others.open(second)
        assert not others.relies
        assert own.open(first)
        assert own.relies
        others.shut(second)
        own.shut(first)
        assert open_gates(engine) == 0


def test_only_many_notifications_in_a_short_time_are_too_many() -> None:
    few, many = Gates(["a"], DEFAULT_TABLES), Gates(["a"], DEFAULT_TABLES)
    slowly = 1.01 * gates.WITHIN_SECONDS / (gates.MANY - 1)
    assert not any(few.heard_too_many(slowly * number) for number in range(100))
    quickly = gates.WITHIN_SECONDS / gates.MANY
    found = [many.heard_too_many(quickly * number) for number in range(gates.MANY)]
    assert found == [False] * (gates.MANY - 1) + [True]
