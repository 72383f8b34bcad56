"""Any command line as a harness: the way in for an agent that has no member of its own.

Installing the program is the task's affair (prepare steps, or the image). The placeholders {{instruction}},
{{base_url}}, {{api_key}} and {{model}} become one word each, whatever is in them: quoting is done here, so a
command may have them bare, in double or in single quotes. In a here-document use $INSTRUCTION instead.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Container, Iterator

from polar.errors import SpecError
from polar.harnesses.base import AgentExit, Harness, Workplace
from polar.spec import AgentSpec, ExecInput

PLACEHOLDERS = ("instruction", "base_url", "api_key", "model")
_PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")
_TOKEN = re.compile(r"""\{\{\s*\w+\s*\}\}|\$\(|\\(?!\{\{).|(?<![^\s;])\#[^\n]*|['"()]""", re.DOTALL)
"""What decides in which quotes a place stands."""


class ShellHarness(Harness):
    """Runs `custom_shell`; its exit code is the agent's."""

    name = "shell"

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__(spec)
        if spec.settings:
            raise SpecError.at("agent.settings", "the shell harness has none; say it in custom_shell")
        if spec.custom_shell is None:
            raise SpecError.at("agent.custom_shell", "is required")
        self.shell: ExecInput = spec.custom_shell
        for match in _PLACEHOLDER.finditer(self.shell.command):
            if match[1].lower() not in PLACEHOLDERS:
                known = ", ".join(f"{{{{{name}}}}}" for name in PLACEHOLDERS)
                raise SpecError.at("agent.custom_shell.command", f"{match[0]} is not known; there are {known}")

    def run(self, place: Workplace) -> AgentExit:
        connection = place.connection
        values = {
            "instruction": place.instruction,
            "base_url": connection.base_url,
            "api_key": connection.api_key,
            "model": connection.model,
        }
        env = {**connection.env(), **place.env, "INSTRUCTION": place.instruction, **(self.shell.env or {})}
        result = place.runtime.exec(
            fill(self.shell.command, values),
            limits=place.limits,
            env=env,
            cwd=self.shell.cwd,
            log=place.logs / "agent",
        )
        return AgentExit.of(result, "the shell command")


def fill(command: str, values: dict[str, str]) -> str:
    """`command` with each placeholder replaced by its value, quoted for the place where it stands."""
    matches = {match.start(): match for match in _PLACEHOLDER.finditer(command)}
    filled, end = "", 0
    for position, quote in _quotes(command, set(matches)):
        match = matches[position]
        # Inside quotes: close them, put the value in quotes of its own, open them again.
        filled += command[end:position] + quote + shlex.quote(values[match[1].lower()]) + quote
        end = match.end()
    return filled + command[end:]


def _quotes(command: str, wanted: Container[int]) -> Iterator[tuple[int, str]]:
    """For each wanted position the quote that is open there: ", ', or none."""
    opened = [""]
    position = 0
    while token := _TOKEN.search(command, position):
        text, inside, position = token[0], opened[-1], token.end()
        if token.start() in wanted:
            yield token.start(), inside
        elif text.startswith("#"):
            # A comment only where no quotes are open, and then its apostrophes mean nothing.
            position = token.start() + 1 if inside else position
        elif inside == "'":
            # No escapes in here: the next quote closes.
            if text.endswith("'"):
                opened.pop()
        elif (text == '"' and inside) or (text == ")" and not inside and len(opened) > 1):
            opened.pop()
        elif text in ('"', "$(") or (not inside and text in ("'", "(")):
            # What stands in $( ) is quoted anew, also between double quotes.
            opened.append(text.strip("$("))
