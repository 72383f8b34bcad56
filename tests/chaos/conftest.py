"""One `polar up` for all faults, and the table at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar.embedded import free_port
from tests.chaos import arrangements, table
from tests.chaos.scene import Scene, receiver

ALL = os.environ.get("POLAR_TEST_CHAOS") == "all"


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """The system that is killed piece by piece."""
    folder = tmp_path_factory.mktemp("chaos")
    (folder / "seen").mkdir()
    with receiver(folder / "seen") as callbacks:
        found = Scene(folder, free_port(), free_port(), callbacks)
        found.start()
        try:
            yield found
            assert found.stop() == 0, found.log()
        finally:
            if found.process.poll() is None:
                found.process.kill()
            arrangements.tidy(found)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was seen."""
    if table.LINES:
        terminalreporter.section("chaos")
        terminalreporter.write_line(table.rows())


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A whole run of the suite that passed writes its table into the documentation."""
    if ALL and exitstatus == 0 and table.LINES and not session.config.option.keyword:
        table.write(Path(session.config.rootpath) / "docs" / "reliability.md")
