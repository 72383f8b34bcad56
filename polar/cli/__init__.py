"""The `polar` command: one file per noun, the original's names and flags where it has them.

Commands talk to a running Polar over REST, or start its processes; none of them reaches into the database
but `up`, `serve_*`, `doctor` and `parity`. Each is loaded when it is named: those that talk need the client alone,
and the others say which extra has what they need.
"""

from __future__ import annotations

import importlib

import click
from click.shell_completion import CompletionItem

from polar import __version__
from polar.client.errors import ClientError
from polar.errors import PolarError

COMMANDS = {
    "up": "up",
    "demo": "demo",
    "dashboard": "dashboard",
    "flower": "flower",
    "submit": "client",
    "status": "client",
    "cancel": "client",
    "results": "results",
    "export": "export",
    "policy": "policy",
    "push": "policy",
    "pause": "policy",
    "resume": "policy",
    "replay": "replay",
    "doctor": "doctor",
    "parity": "parity",
    "serve_rollout": "serve",
    "serve_gateway": "serve",
    "serve_engine": "serve",
}
"""Each command and the file of this folder that has it."""
SERVER = "it needs all of Polar: pip install polar-rollout, in place of polar-rollout-client"


class Commands(click.Group):
    """Errors that Polar names are shown as one sentence, not as a traceback."""

    def list_commands(self, ctx: click.Context | None) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            module = importlib.import_module(f"polar.cli.{COMMANDS[cmd_name]}")
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] == "polar":
                raise
            return _unavailable(cmd_name, str(error.name))
        found: click.Command = getattr(module, cmd_name)
        return found

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names of commands without loading any: a shell asks at every press of the key."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name) for name in COMMANDS if name.startswith(incomplete)]

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (PolarError, ClientError) as error:
            raise click.ClickException(str(error)) from error


def _unavailable(name: str, missing: str) -> click.Command:
    """In place of a command whose packages are not installed."""

    def refuse(**_: object) -> None:
        raise click.ClickException(f"`polar {name}` is not installed ({missing} is missing); {SERVER}")

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, callback=refuse, help=f"Not installed; {SERVER}.", context_settings=settings)


EPILOG = """Example: polar submit examples/tool_lookup/task.yaml

Completion of commands, options and task names: eval "$(_POLAR_COMPLETE=bash_source polar)" in ~/.bashrc; zsh_source
and fish_source for the others."""


@click.group(
    cls=Commands,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="polar")
def main() -> None:
    """Rollouts as a service for agentic reinforcement learning.

    \b
    polar up                      all of Polar on this machine
    polar submit task.yaml        run a task and watch it
    polar status                  what is going on
    """
