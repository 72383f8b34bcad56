"""The `polar` command: one file per noun, the original's names and flags where it has them.

Commands talk to a running Polar over REST, or start its processes; none of them reaches into the database
but `up`, `serve_*`, `doctor` and `parity`.
"""

from __future__ import annotations

import click

from polar import __version__
from polar.cli.client import cancel, status, submit
from polar.cli.dashboard import dashboard
from polar.cli.demo import demo
from polar.cli.doctor import doctor
from polar.cli.flower import flower
from polar.cli.parity import parity
from polar.cli.policy import pause, policy, resume
from polar.cli.replay import replay
from polar.cli.results import results
from polar.cli.serve import serve_engine, serve_gateway, serve_rollout
from polar.cli.up import up
from polar.embedded import EmbeddedError
from polar.errors import PolarError


class Commands(click.Group):
    """Errors that Polar names are shown as one sentence, not as a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (PolarError, EmbeddedError) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="polar")
def main() -> None:
    """Rollouts as a service for agentic reinforcement learning.

    \b
    polar up                      all of Polar on this machine
    polar submit task.yaml        run a task and watch it
    polar status                  what is going on
    """


CLIENTS = (submit, status, cancel, results, policy, pause, resume, replay)
for command in (up, demo, dashboard, flower, *CLIENTS, doctor, parity, serve_rollout, serve_gateway, serve_engine):
    main.add_command(command)
