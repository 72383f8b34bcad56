"""Polar's client: submit tasks, stream results as sessions end, move the policy. Needs httpx and orjson, no server.

    from polar.client import Client

    with Client("http://localhost:8080", key) as polar:
        for result in polar.run(tasks, progress=True):
            train_on(result)

`AsyncClient` is the same for asyncio. What travels is in `types`, what goes wrong in `errors`.
"""

from __future__ import annotations

from polar.client.aio import AsyncClient
from polar.client.errors import (
    ApiError,
    AuthError,
    BusyError,
    ClientError,
    ConflictError,
    InvalidError,
    NotFoundError,
    NotHoldingError,
    ProtocolError,
    ServerError,
    UnreachableError,
)
from polar.client.retry import Retry
from polar.client.sync import Client
from polar.client.types import (
    Accepted,
    Policy,
    SessionResult,
    SessionState,
    Task,
    TaskStatus,
    Trace,
    Trajectory,
)

__all__ = [
    "Accepted",
    "ApiError",
    "AsyncClient",
    "AuthError",
    "BusyError",
    "Client",
    "ClientError",
    "ConflictError",
    "InvalidError",
    "NotFoundError",
    "NotHoldingError",
    "Policy",
    "ProtocolError",
    "Retry",
    "ServerError",
    "SessionResult",
    "SessionState",
    "Task",
    "TaskStatus",
    "Trace",
    "Trajectory",
    "UnreachableError",
]
