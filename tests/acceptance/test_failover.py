"""A standby takes the place of a primary that dies: nothing acknowledged is lost."""

from __future__ import annotations

import pytest
from sqlalchemy import NullPool, create_engine, func, select
from sqlalchemy.orm import Session

from sa_jobs.models import Job
from sa_jobs.models import metadata as queue_metadata
from tests.acceptance.app import jobs, metadata
from tests.support.postgres import Cluster
from tests.support.proxy import Proxy
from tests.support.standby import Standby
from tests.support.waiting import wait_until
from tests.support.workers import WorkerProcess

pytestmark = pytest.mark.acceptance


def test_the_same_worker_runs_every_acknowledged_job_on_the_promoted_standby(
    cluster: Cluster,
) -> None:
    programs = cluster.bin_directory
    with Cluster(programs) as primary:
        engine = create_engine(primary.url(), poolclass=NullPool)
        for tables in (queue_metadata, metadata):
            tables.create_all(engine)
        with Standby(programs, primary) as standby, Proxy(primary.url()) as proxy:
            standby.make_synchronous()
            with WorkerProcess(proxy.url) as worker:
                worker.wait_until_ready()
                ids = []
                for _ in range(20):
                    with Session(engine) as session, session.begin():
                        ids.append(jobs.enqueue(session, "effect", {"seconds": 0.5}).id)
                proxy.direct_to(standby.url())
                primary.stop("immediate")
                proxy.cut()
                # The worker meets a server that takes no writes yet.
                wait_until(lambda: "trying again" in worker.log, "the worker notices")
                standby.promote()

                promoted = create_engine(standby.url(), poolclass=NullPool)
                done = select(func.count()).where(Job.id.in_(ids), Job.status == "done")
                with promoted.connect() as connection:
                    wait_until(
                        lambda: connection.execute(done).scalar_one() == len(ids),
                        "every job is done",
                    )
                    connection.rollback()
                    effects = metadata.tables["effects"]
                    found = connection.execute(select(effects.c.job_id)).scalars()
                    assert sorted(found) == ids
                assert worker.process.poll() is None
                assert worker.stop() == 0
