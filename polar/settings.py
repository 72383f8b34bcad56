"""Every setting of a Polar process: the one file that reads the environment.

Values are frozen when the process starts. Which nodes, lanes and engines there are is the topology's affair.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from polar.errors import SpecError


@dataclass(frozen=True, slots=True)
class Settings:
    """Each field is the variable `POLAR_<NAME>`; the text under it is its documentation."""

    database_url: str = ""
    """Postgres URL. Empty: `polar up` embeds one."""
    broker_url: str = ""
    """Redis or Valkey URL. Empty: `polar up` embeds one."""
    topology: str = ""
    """Path of topology.yaml. Empty: one node with lane gpu0 on the tiny engine."""
    home: str = ".polar"
    """Folder for embedded servers, workspaces, logs and installed harnesses."""
    node_id: str = "local"
    """Which node of the topology this process belongs to."""
    lane: str = "gpu0"
    """Default lane of a worker started without -Q."""
    host: str = "127.0.0.1"
    """Address that the API and the proxy listen on."""
    port: int = 8080
    """Port of the REST API and the pages."""
    proxy_port: int = 8100
    """Port of the node's proxy."""
    auth: str = "required"
    """`required`: the REST API wants a key. `open`: it does not; for a machine of one's own."""
    pages_secret: str = ""
    """Secret that signs the pages' logins. Empty: this process makes its own, and its end ends logins."""
    webhook_secret: str = ""
    """Secret that signs callbacks. Empty: they are not signed; `polar up` makes one."""
    callback_allow: str = ""
    """Hosts that callbacks may go to, comma-separated; `*.example.com` is every host below that. Empty: any."""
    judge_allow: str = ""
    """Hosts that evaluators' judges may be asked at, as in POLAR_CALLBACK_ALLOW. Empty: any."""
    upload_from: str = ""
    """Folders of the node that a task's uploads may come from, separated by colons. Empty: any but the Polar home."""
    max_open_tasks: int = 10_000
    """Tasks that one API key may have running. 0: any number."""
    max_open_sessions: int = 200_000
    """Sessions of one API key that have not ended. 0: any number."""
    max_body_mb: int = 64
    """Largest request body that the API and the proxy take, in MiB."""
    api_threads: int = 8
    """Threads of the API."""
    proxy_processes: int = 1
    """Event-loop processes of a node's proxy."""
    flower_port: int = 5555
    """Port on which `polar flower` listens, on this machine only; the pages lead there."""
    worker_threads: int = 16
    """Stages that one worker runs at once, unless -c says otherwise."""
    prepared_states: int = 16
    """Prepared states that a node keeps for tasks with `prepare_once`. 0: none, every session prepares its own."""
    prepared_mb: int = 20_000
    """MiB of disk for them; the longest unused go first."""
    prepared_idle_seconds: int = 3600
    """Seconds after which an unused one goes."""
    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""
    log_format: str = "text"
    """`text`: lines for people. `json`: one object a line, with task, session, stage and lane as fields."""
    otel_endpoint: str = ""
    """OTLP collector for traces, such as `http://127.0.0.1:4318`; needs the extra `otel`. Empty: none are made."""

    @classmethod
    def load(cls, environ: dict[str, str] | None = None) -> Settings:
        """From the environment. Raises SpecError for a value that cannot be."""
        source = dict(os.environ) if environ is None else environ
        values: dict[str, Any] = {}
        for field in fields(cls):
            raw = source.get(f"POLAR_{field.name.upper()}")
            if raw is None:
                continue
            if isinstance(field.default, int):
                try:
                    values[field.name] = int(raw)
                except ValueError:
                    raise SpecError.at(f"POLAR_{field.name.upper()}", f"{raw!r} is not a whole number") from None
            else:
                values[field.name] = raw
        settings = cls(**values)
        if settings.auth not in ("required", "open"):
            raise SpecError.at("POLAR_AUTH", f"{settings.auth!r} is neither 'required' nor 'open'")
        if settings.log_format not in ("text", "json"):
            raise SpecError.at("POLAR_LOG_FORMAT", f"{settings.log_format!r} is neither 'text' nor 'json'")
        return settings

    def environ(self) -> dict[str, str]:
        """The variables that make a child process load the same settings."""
        return {f"POLAR_{f.name.upper()}": str(getattr(self, f.name)) for f in fields(self)}

    @property
    def home_path(self) -> Path:
        return Path(self.home).resolve()

    @property
    def workspaces(self) -> Path:
        return self.home_path / "workspaces"

    @property
    def prepared_folder(self) -> Path:
        return self.home_path / "prepared"

    @property
    def harness_cache(self) -> Path:
        return self.home_path / "harnesses"


def child_environ(settings: Settings, **extra: str) -> dict[str, str]:
    """This process's environment with the settings and `extra` on top, for children."""
    return {**os.environ, **settings.environ(), **extra}
