"""The same commands inside of an application, such as `flask jobs`: on its database and tables."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import click

from sa_jobs.cli.invocation import Application, Invocation
from sa_jobs.cli.program import commands
from sa_jobs.cli.run import exit_code, started_by

# What is not about the application: a shop of its own.
_LEFT_OUT = frozenset({"demo"})
# What the application itself says, by command; None for all.
_SAID: dict[str | None, frozenset[str]] = {
    None: frozenset({"target"}),
    "worker": frozenset({"database_url"}),
}
_HELP = {
    "database_url": "The database. Default: the application's.",
    "schema": "Schema of the tables. Default: the application's.",
    "name": "Name of the tables. Default: the application's.",
}


class ApplicationCommands(click.Group):
    """Every command of `sa-jobs`, for the application that `load` returns."""

    def __init__(self, load: Callable[[], Application], **attributes: Any) -> None:
        super().__init__(**attributes)
        self._load = load
        for name, command in commands.commands.items():
            if name not in _LEFT_OUT:
                self.add_command(_inside(command))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, and end the program with its exit code."""

        def call() -> Any:
            ctx.obj = Invocation(started_by(), self._load())
            return super(ApplicationCommands, self).invoke(ctx)

        ctx.exit(exit_code(call, ctx.command_path))


def _inside(command: click.Command) -> click.Command:
    """Return the command without what the application says in its place."""
    made = copy.copy(command)
    if isinstance(made, click.Group):
        made.commands = {name: _inside(each) for name, each in made.commands.items()}
    said = _SAID[None] | _SAID.get(command.name, frozenset())
    made.params = [_default(each) for each in command.params if each.name not in said]
    made.help = "\n\n".join(
        part for part in (command.help or "").split("\n\n") if "MODULE:ATTR" not in part
    )
    return made


def _default(parameter: click.Parameter) -> click.Parameter:
    if not isinstance(parameter, click.Option) or parameter.name not in _HELP:
        return parameter
    made = copy.copy(parameter)
    made.help, made.show_default = _HELP[parameter.name], False
    return made
