"""Several worker processes, kept running: replaced when they die or have done enough.

`supervisor` decides, `child` is one of its processes, and `lifeline` is all that a worker process
knows of it. The supervisor holds no database connection and imports nothing of the application's.
"""

from sa_jobs.supervisor.lifeline import Lifeline, Supervised
from sa_jobs.supervisor.supervisor import Supervisor

__all__ = ["Lifeline", "Supervised", "Supervisor"]
