"""Faults at random over real workers and enqueuers, and a verdict on what became of the jobs.

`python -m benchmarks.chaos --minutes 10 --seed 1`. The main process brings up a primary with a
synchronous standby behind a proxy (`database`), workers that it starts again when they die
(`fleet`), and `enqueuers`. For so many minutes it does to them what the `schedule` says (`faults`).
Then it lets everything heal and the jobs end, and judges (`verdict`) by what the database, the
server's log and the `ledger` say (`evidence`).
"""
