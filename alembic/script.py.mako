<%!
    def commented(code):
        lines = (line.strip() for line in code.splitlines())
        return "\n".join(f"    # {line}" for line in lines if line and not line.startswith("#"))
%>\
"""${message}"""

from __future__ import annotations

from sa_jobs.migrations._ddl import Target, applies, undoes
from sa_jobs.migrations._steps import Step

revision = ${repr(up_revision).replace("'", '"')}
down_revision = ${repr(down_revision).replace("'", '"')}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}

STEP = Step(
    revision,
    down_revision,
    phase="expand",
    min_client="",
    released_in="",
    summary="${message}",
)


@applies(STEP)
def upgrade(target: Target) -> None:
    """${message}"""
% if upgrades and upgrades.strip() != "pass":
    # Write this as SQL, on target.table():
${commented(upgrades)}
% endif
    target.alter(f"""ALTER TABLE {target.table()} ...""")


@undoes(STEP)
def downgrade(target: Target) -> None:
    """Take it back."""
% if downgrades and downgrades.strip() != "pass":
    # Write this as SQL, on target.table():
${commented(downgrades)}
% endif
    target.alter(f"""ALTER TABLE {target.table()} ...""")
