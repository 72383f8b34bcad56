"""One `polar up` for the tests of each file."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from polar.embedded import free_port
from tests.e2e.up import Up, start


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A Polar of one file's own; it ends well when it is asked to."""
    running = start(tmp_path_factory.mktemp("up") / "home", free_port(), free_port())
    yield running
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(60) == 0
