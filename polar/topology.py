"""topology.yaml: which nodes there are, their lanes, and the engines behind them. The original's file loads as it is.

Strict: an unknown key is refused by its path. Lanes are Polar's addition; a node without `lanes` has one,
`gpu0`, made from its own engine. Addresses of databases are settings, not topology.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from polar.errors import SpecError
from polar.spec import RuntimeSpec, validation_errors


def shown_url(url: str) -> str:
    """A URL as it may be told to anybody: without the user and password that may stand in it."""
    return re.sub(r"//[^/?#]*@", "//***@", url)


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)


class EngineSpec(Part):
    """The inference server a lane talks to."""

    engine: str = "sglang"
    """A name of the table of engines."""
    base_url: str
    """Where it listens, as the node reaches it."""
    mode: Literal["token", "canonical"] = "token"
    """`token`: Polar renders and sends ids. `canonical`: the engine's chat endpoint renders, and says what it saw;
    traces may then drift. An engine without a token endpoint is always canonical."""
    model: str | None = None
    """Name the engine serves; None: ask it."""
    tokenizer: str | None = None
    """Folder with tokenizer.json; None: ask the engine."""
    renderer: str = "auto"
    """Model family's renderer, such as `chatml` or `qwen3`; auto: by the tokenizer's folder and the model's name."""
    timeout_seconds: float = Field(default=900.0, gt=0)
    """How long one call may take."""
    parity_alarm: float = Field(default=1e-2, gt=0)
    """Mean difference between recorded and recomputed log-probabilities from which on `polar parity` calls it wrong:
    1e-2 suits half precision, 1e-4 single."""


class LaneSpec(Part):
    """A GPU-pinned queue with its engine."""

    name: str = Field(default="gpu0", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]*$")
    """Its queue; unique in the topology, so `node1.gpu0` where nodes share a broker."""
    engine: EngineSpec
    """The engine of its own."""
    max_execute: int = Field(default=4, ge=1)
    """Agents that run at once."""
    ready_buffer: int = Field(default=4, ge=0)
    """Sessions prepared ahead of them."""
    max_evaluate: int = Field(default=4, ge=1)
    """Evaluations that run at once."""


class InferenceSpec(Part):
    """How the original names a node's engine."""

    engine: str = "sglang"
    """A name of the table of engines."""
    base_url: str = "http://127.0.0.1:8000"
    """Where it listens."""
    scheduler: str = "none"
    """Taken for the original's sake."""


class NodeSpec(Part):
    """One machine, with the original's fields, and `lanes`."""

    id: str = "local"
    """Its name."""
    host: str = "127.0.0.1"
    """Address that its proxy listens on."""
    port: int = Field(default=8081, ge=1, le=65535)
    """And port."""
    public_url: str | None = None
    """How runtimes reach the proxy; None: from host and port."""
    model_served: str | None = None
    """Name that the engine of `inference` serves."""
    inference: InferenceSpec | None = None
    """Engine of the one lane of a node without `lanes`."""
    max_init_workers: int = Field(default=4, ge=1)
    """`ready_buffer` of that lane."""
    max_run_workers: int = Field(default=2, ge=1)
    """`max_execute` of that lane."""
    max_postrun_workers: int = Field(default=4, ge=1)
    """`max_evaluate` of that lane."""
    default_runtime: RuntimeSpec | None = None
    """Of tasks that name none."""
    lanes: tuple[LaneSpec, ...] = ()
    """GPU-pinned queues, each with its engine."""

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return (self.public_url or f"http://{host}:{self.port}").rstrip("/")

    @model_validator(mode="before")
    @classmethod
    def _one_lane(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("lanes") or not isinstance(values.get("inference"), dict):
            return values
        engine = {key: values["inference"][key] for key in ("engine", "base_url") if key in values["inference"]}
        lane = {
            "name": "gpu0",
            "engine": {"base_url": "http://127.0.0.1:8000", **engine, "model": values.get("model_served")},
            "max_execute": values.get("max_run_workers", 2),
            "ready_buffer": values.get("max_init_workers", 4),
            "max_evaluate": values.get("max_postrun_workers", 4),
        }
        return {**values, "lanes": [lane]}


class PersistenceSpec(Part):
    """Taken for the original's sake. Polar keeps completions in Postgres, whole and before they are answered."""

    enabled: bool = True
    max_field_bytes: int = 1 << 20
    queue_size: int = 1024
    write_workers: int = 8
    batch_size: int = 16
    write_max_attempts: int = 3
    retry_backoff_seconds: float = 0.1


class GatewaySpec(Part):
    """The nodes."""

    heartbeat_interval_seconds: int = Field(default=30, ge=1)
    """Taken for the original's sake."""
    rollout_server_url: str | None = None
    """Taken for the original's sake: nodes and API meet in Postgres."""
    completion_persistence: PersistenceSpec = PersistenceSpec()
    """Taken for the original's sake."""
    nodes: tuple[NodeSpec, ...] = Field(default=(), min_length=0)
    """One for each machine."""


class RolloutSpec(Part):
    """The API's own entry. What stands below `public_url` is taken for the original's sake, and does nothing."""

    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = Field(default=8080, ge=1, le=65535)
    """And port."""
    public_url: str | None = None
    """How clients reach it; None: from host and port."""
    save_dir: str | None = None
    dispatch_poll_interval_seconds: float = 1.0
    callback_grace_seconds: float = 120.0
    http_max_connections: int = 1024
    http_max_keepalive_connections: int = 256
    cleanup_max_concurrency: int = 128
    cleanup_max_attempts: int = 3
    cleanup_retry_backoff_seconds: float = 0.1

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return (self.public_url or f"http://{host}:{self.port}").rstrip("/")


class Topology(Part):
    """The whole file."""

    rollout: RolloutSpec = RolloutSpec()
    """The API."""
    gateway: GatewaySpec = GatewaySpec()
    """The nodes."""

    @model_validator(mode="after")
    def _unique(self) -> Topology:
        nodes = [node.id for node in self.gateway.nodes]
        lanes = [lane.name for node in self.gateway.nodes for lane in node.lanes]
        for what, names in (("id", nodes), ("lanes.name", lanes)):
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise ValueError(f"gateway.nodes.{what}: {', '.join(sorted(twice))} is used twice")
        return self

    def node(self, node_id: str) -> NodeSpec:
        """The node's entry. Raises SpecError."""
        for node in self.gateway.nodes:
            if node.id == node_id:
                return node
        known = ", ".join(node.id for node in self.gateway.nodes) or "none"
        raise SpecError.at("gateway.nodes.id", f"{node_id!r} is not in the topology; there are: {known}")

    def lane(self, name: str) -> tuple[NodeSpec, LaneSpec]:
        """The lane's entry and its node's. Raises SpecError."""
        for node in self.gateway.nodes:
            for lane in node.lanes:
                if lane.name == name:
                    return node, lane
        known = ", ".join(lane.name for node in self.gateway.nodes for lane in node.lanes) or "none"
        raise SpecError.at("gateway.nodes.lanes.name", f"{name!r} is not in the topology; there are: {known}")


TINY_ENGINE_URL = "http://127.0.0.1:8000"


def single_node(node_id: str, proxy_port: int, engine_url: str = TINY_ENGINE_URL) -> Topology:
    """What holds without a file: one node whose lane gpu0 talks to an engine on this machine."""
    lane = LaneSpec(name="gpu0", engine=EngineSpec(engine="sglang", base_url=engine_url))
    runtime = RuntimeSpec(backend="local")
    node = NodeSpec(id=node_id, port=proxy_port, lanes=(lane,), default_runtime=runtime)
    return Topology(gateway=GatewaySpec(nodes=(node,)))


def load_topology(path: str | Path) -> Topology:
    """Read and check a topology file. Raises SpecError that names file and key."""
    try:
        data = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise SpecError(f"topology {path}: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise SpecError(f"topology {path}: not valid YAML: {error}") from error
    try:
        return Topology.model_validate(data or {})
    except ValidationError as error:
        errors = validation_errors(error)
        raise SpecError(
            f"topology {path}: " + "; ".join(f"{field}: {reason}" for field, reason in errors), errors=errors
        ) from None
