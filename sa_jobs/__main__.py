"""`python -m sa_jobs` is the command `sa-jobs`."""

import sys

from sa_jobs.cli import main

if __name__ == "__main__":
    sys.exit(main())
