"""The runner: claims jobs, runs their handlers, writes the outcomes. It contains no SQL.

`worker` starts and ends it all; `loop` is where everything meets, on one thread. Around it:
`threads` and `coroutines` run handlers by way of `execution`, within their `surroundings`;
`hook_calls` calls an application's hooks there, and `notices` those of what ended elsewhere;
`heartbeat` keeps the leases and `watch` sees to those that it cannot keep, `wakeup` listens,
`sweep` reclaims, `writer` stores outcomes, `pace` says when to look for jobs and `allowance` when
to look no more, `links` holds the connections, `faults` tells errors apart. `signals` stops a
worker by signals, `interruptions` keeps those of a host from cutting it short.
"""

from sa_jobs.worker.loop import EXIT_FAILURE, EXIT_HANDED_BACK, EXIT_OK, EXIT_RECYCLED
from sa_jobs.worker.surroundings import Around
from sa_jobs.worker.worker import Worker

__all__ = ["EXIT_FAILURE", "EXIT_HANDED_BACK", "EXIT_OK", "EXIT_RECYCLED", "Around", "Worker"]
