"""What a trainer may ask for: the task as typed values, strict, with the original's field names.

Validation that needs no I/O lives here. Whether a name exists in a family is asked at submit, by the API.
Fields marked "addition" are not in the original's schema; a client of the original never sends them.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from polar.errors import SpecError

TaskId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:\-]*$")]
MAX_SESSIONS_PER_TASK = 20_000


class Spec(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )


class ExecInput(Spec):
    """A shell command inside the runtime."""

    command: str = Field(min_length=1)
    """A line for `sh`."""
    cwd: str | None = None
    """Folder inside the runtime; None: its workspace."""
    env: dict[str, str] | None = None
    """Variables beside the runtime's own."""


class PrepareAction(Spec):
    """One step that makes a runtime ready, in order."""

    type: Literal["upload_file", "upload_dir", "exec"]
    """Copy a file or a folder in, or run a command."""
    source: str | None = None
    """Path on the node, for uploads."""
    target: str | None = None
    """Path inside the runtime, for uploads."""
    command: str | None = None
    """A line for `sh`, for exec."""
    cwd: str | None = None
    """Folder inside the runtime, for exec."""
    env: dict[str, str] | None = None
    """Variables beside the runtime's own, for exec."""
    max_attempts: int = Field(default=1, ge=1, le=10)
    """How often a step that fails is tried."""
    retry_backoff_seconds: float = Field(default=1.0, ge=0, le=60)
    """Pause before the second try; doubled each time, up to 5 s."""

    @model_validator(mode="after")
    def _fields_of_type(self) -> PrepareAction:
        if self.type == "exec":
            if not self.command:
                raise ValueError("an exec action needs command")
            if self.source or self.target:
                raise ValueError("an exec action takes no source or target")
        else:
            if not (self.source and self.target):
                raise ValueError(f"an {self.type} action needs source and target")
            if self.command or self.env or self.cwd:
                raise ValueError(f"an {self.type} action takes no command, cwd or env")
        return self


class RuntimeSpec(Spec):
    """The sandbox."""

    backend: str = "docker"
    """Which runtime: a name of the table of runtimes."""
    image: str | None = None
    """Required by runtimes that start from images."""
    prepare: tuple[PrepareAction, ...] = ()
    """Steps before the agent starts."""
    eval_prepare: tuple[PrepareAction, ...] | None = None
    """None: the evaluator's fresh runtime replays `prepare`."""
    env: dict[str, str] = {}
    """Variables of every command inside."""
    network: str | None = "host"
    """`host`: the node's network. `none`: the proxy, and only the proxy."""
    workdir: str | None = None
    """Folder in which commands start; None: the workspace."""
    cpus: int | None = Field(default=None, ge=1)
    """Processors at most."""
    memory_mb: int | None = Field(default=None, ge=16)
    """Memory at most, in MiB."""
    pids: int | None = Field(default=None, ge=8)
    """Addition. Processes and threads inside, all together."""
    storage_mb: int | None = Field(default=None, ge=1)
    """Disk at most, in MiB."""
    gpus: int = Field(default=0, ge=0)
    """GPUs that the runtime sees."""
    allow_internet: bool = True
    """False: as `network: none`."""
    import_path: str | None = None
    """A runtime class of your own, `module:Class`; wins over `backend`."""
    kwargs: dict[str, Any] = {}
    """Arguments of that runtime's own."""
    prepare_once: bool = False
    """Addition. The prepare steps come out the same for every session: each node does them once, without the session's
    own variables, and its sessions start from copies."""

    @property
    def name(self) -> str:
        return self.import_path or self.backend

    @property
    def isolated(self) -> bool:
        """Whether nothing but the proxy may be reached."""
        return self.network == "none" or not self.allow_internet


class MCPServerSpec(Spec):
    """A server of tools beside the harness's own."""

    name: str = Field(min_length=1)
    """What the harness calls it."""
    transport: Literal["stdio", "sse", "streamable-http"]
    """How the harness reaches it."""
    command: str | None = None
    """Program, for stdio."""
    args: tuple[str, ...] = ()
    """Its arguments."""
    url: str | None = None
    """Address, for the others."""

    @model_validator(mode="after")
    def _address(self) -> MCPServerSpec:
        if self.transport == "stdio" and not self.command:
            raise ValueError("a stdio server needs command")
        if self.transport != "stdio" and not self.url:
            raise ValueError(f"a {self.transport} server needs url")
        return self


class AgentSpec(Spec):
    """The harness and how to start it."""

    harness: str | None = None
    """A name of the table of harnesses."""
    import_path: str | None = None
    """A harness of your own, `module:Class`, instead."""
    model_name: str | None = None
    """What the harness is told that the model is called; None: what the engine says."""
    settings: dict[str, Any] = {}
    """Of the harness's own; each harness names those that it takes."""
    env: dict[str, str] = {}
    """Variables of the harness's process."""
    mcp_servers: tuple[MCPServerSpec, ...] = ()
    """Written into the harness's own configuration."""
    skills_path: str | None = None
    """Folder inside the runtime whose skills are copied to where the harness looks for them."""
    custom_shell: ExecInput | None = None
    """The command line of harness `shell`; {{instruction}}, {{base_url}}, {{api_key}} and {{model}} are filled in."""
    other_models: Literal["serve", "refuse"] = "serve"
    """Addition. What becomes of a call for a model that is not `model_name`: the policy answers it, or a 404 does."""

    @property
    def name(self) -> str:
        return self.import_path or self.harness or ""

    @model_validator(mode="after")
    def _one_harness(self) -> AgentSpec:
        if (self.harness is None) == (self.import_path is None):
            raise ValueError("give exactly one of harness and import_path")
        if (self.harness == "shell") != (self.custom_shell is not None):
            raise ValueError("custom_shell is required with harness 'shell', and only there")
        if self.other_models == "refuse" and self.model_name is None:
            raise ValueError("other_models: refuse needs model_name")
        if self.harness == "shell" and (self.mcp_servers or self.skills_path):
            raise ValueError("the shell harness takes no mcp_servers and no skills_path")
        return self


class StrategySpec(Spec):
    """How completions become traces."""

    strategy: str = "per_request"
    """A name of the table of builders, or `module:Class`."""
    config: dict[str, Any] = {}
    """Of the builder's own."""


class EvaluatorSpec(Spec):
    """Who judges what the agent did."""

    strategy: str
    """A name of the table of evaluators, or `module:Class`."""
    config: dict[str, Any] = {}
    """Of the evaluator's own."""
    env: dict[str, str] = {}
    """Variables of its commands."""
    refresh_runtime: bool = False
    """Judge in a fresh runtime instead of the one the agent lived in."""


class SamplingSpec(Spec):
    """Addition. Overrides what harnesses ask for, so that data is on-policy."""

    temperature: float | None = Field(default=None, ge=0, le=5)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = Field(default=None, ge=1)


class TaskRequest(Spec):
    """What a trainer posts; fans out into `num_samples` sessions."""

    task_id: TaskId
    """Its name; that of a task which has ended may be used again."""
    instruction: str
    """What the agent is told."""
    num_samples: int = Field(default=1, ge=1, le=MAX_SESSIONS_PER_TASK)
    """How many sessions."""
    timeout_seconds: float = Field(default=600.0, gt=0, le=7 * 86400)
    """A session's budget in seconds, from the start of prewarm: queueing is free."""
    runtime: RuntimeSpec | None = None
    """None: the node's default_runtime."""
    agent: AgentSpec
    """Who does it."""
    builder: StrategySpec = StrategySpec()
    """How completions become traces."""
    evaluator: EvaluatorSpec | None = None
    """Who judges it; None: nobody, and there is no reward."""
    callback_url: str | None = None
    """Where results are posted."""
    callback_events: tuple[Literal["task", "session"], ...] = ("task",)
    """Addition. What is posted to `callback_url`: the task's result when it ends, each session's when that ends."""
    metadata: dict[str, Any] = {}
    """Yours; it comes back with every result. `group_id` is what the results feed can be asked for."""
    dispatch_priority: int = Field(default=0, ge=0, le=100)
    """Higher goes first."""
    early_stop_min_usable_sessions: int | None = Field(default=None, ge=1)
    """Once so many sessions are usable, the others are cancelled."""
    agent_timeout_seconds: float | None = Field(default=None, gt=0)
    """Addition. The agent's own budget in seconds, from the start of execute."""
    sampling: SamplingSpec = SamplingSpec()
    """Addition. Overrides what the harness asks for."""
    max_turns: int | None = Field(default=None, ge=1)
    """Addition. Model calls a session may make."""
    max_session_tokens: int | None = Field(default=None, ge=1)
    """Addition. Tokens a session may sample."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Addition. Versions that a trained token may be behind the policy when its session is judged; None: the policy's
    own bound."""
    history: Literal["sampled", "tool_cycle", "template"] = "sampled"
    """Addition. What the model is shown of its own turns. `sampled`: the very tokens it sampled, always. `tool_cycle`:
    these until the next message of a user, then what the model's template prints, which may leave reasoning out.
    `template`: what the template prints, at every call."""
    strict: bool = False
    """Addition. Traces that are not `exact` are quarantined: kept, not handed out for training."""
    lanes: tuple[str, ...] | None = None
    """Addition. Lanes that may take this task; None: any."""

    @field_validator("callback_url")
    @classmethod
    def _http_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("must be an http or https URL")
        return value

    @model_validator(mode="after")
    def _together(self) -> TaskRequest:
        if (self.early_stop_min_usable_sessions or 0) > self.num_samples:
            raise ValueError("early_stop_min_usable_sessions: must be at most num_samples")
        agent_timeout = self.metadata.get("agent_timeout")
        if agent_timeout is not None and (
            isinstance(agent_timeout, bool) or not isinstance(agent_timeout, (int, float)) or agent_timeout <= 0
        ):
            raise ValueError("metadata.agent_timeout: must be a positive number of seconds")
        return self

    @property
    def group_id(self) -> str | None:
        """`metadata.group_id` as text, as the results feed asks for it."""
        found = self.metadata.get("group_id")
        return found if found is None or isinstance(found, str) else json.dumps(found)

    @property
    def agent_budget(self) -> float | None:
        """Seconds for the agent alone; `metadata.agent_timeout` is how the original spells it."""
        return self.agent_timeout_seconds or self.metadata.get("agent_timeout")


def validation_errors(error: ValidationError) -> list[tuple[str, str]]:
    """(field path, reason) pairs of a pydantic failure, in plain words."""
    found = []
    for item in error.errors(include_url=False, include_context=False):
        path = ".".join(str(part) for part in item["loc"])
        reason = "unknown field" if item["type"] == "extra_forbidden" else item["msg"].removeprefix("Value error, ")
        field, _, rest = reason.partition(": ")
        if not path and rest and " " not in field:
            path, reason = field, rest
        found.append((path or "(task)", reason))
    return found


def parse_task(body: object) -> TaskRequest:
    """A validated task from parsed JSON. Raises SpecError naming each wrong field."""
    if not isinstance(body, dict):
        raise SpecError.at("(body)", "must be a JSON object")
    try:
        return TaskRequest.model_validate(body)
    except ValidationError as error:
        errors = validation_errors(error)
        raise SpecError("; ".join(f"{field}: {reason}" for field, reason in errors[:5]), errors=errors) from None
