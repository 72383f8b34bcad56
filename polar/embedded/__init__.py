"""Servers in a box: Postgres and a broker from Python wheels, and the supervisor that runs them for `polar up`.

Nothing here knows Polar's tables, tasks or routes: the command line puts the services together and passes the servers'
URLs on. Linux only; importing works everywhere.
"""

from polar.embedded.broker import EmbeddedBroker
from polar.embedded.errors import EmbeddedError
from polar.embedded.files import folder_lock
from polar.embedded.ports import free_port, require_free_port
from polar.embedded.postgres import EmbeddedPostgres
from polar.embedded.process import spawn, stop
from polar.embedded.service import Service
from polar.embedded.supervisor import Supervisor

__all__ = [
    "EmbeddedBroker",
    "EmbeddedError",
    "EmbeddedPostgres",
    "Service",
    "Supervisor",
    "folder_lock",
    "free_port",
    "require_free_port",
    "spawn",
    "stop",
]
