"""Coverage-guided fuzzing of the dialects' readers: bytes become JSON values that are put into good bodies.

    python tests/fuzz/fuzz_dialects.py openai_chat -max_total_time=60

Needs `atheris` (`make fuzz` installs it). Ends with a crash file on the first body that is neither read nor refused.
"""

from __future__ import annotations

import copy
import sys

import atheris

with atheris.instrument_imports(include=["polar.dialects", "polar.messages"]):
    from polar.dialects import DIALECTS
    from polar.dialects.base import Dialect
    from polar.registry import load

from tests.unit.dialects.bodies import BODIES
from tests.unit.dialects.test_any_body import changed, check, places

NAME = sys.argv[1]
DIALECT = load("dialect", DIALECTS, NAME, Dialect)()
HOWS = ("replace", "remove", "double", "wrap")


def value(data: atheris.FuzzedDataProvider, depth: int = 0) -> object:
    """A JSON value made of the fuzzer's bytes."""
    kind = data.ConsumeIntInRange(0, 8 if depth < 3 else 6)
    if kind == 7:
        return [value(data, depth + 1) for _ in range(data.ConsumeIntInRange(0, 3))]
    if kind == 8:
        return {data.ConsumeUnicodeNoSurrogates(8): value(data, depth + 1) for _ in range(data.ConsumeIntInRange(0, 3))}
    makers = (
        lambda: None,
        data.ConsumeBool,
        lambda: data.ConsumeInt(8),
        data.ConsumeRegularFloat,
        lambda: data.ConsumeUnicodeNoSurrogates(16),
        lambda: data.PickValueInList(["user", "assistant", "text", "function", "custom", "auto", "", "data:,"]),
        lambda: "x",
    )
    return makers[kind]()


def one_input(raw: bytes) -> None:
    """One body."""
    data = atheris.FuzzedDataProvider(raw)
    body, params = data.PickValueInList(BODIES[NAME])
    body = copy.deepcopy(body)
    for _ in range(data.ConsumeIntInRange(1, 4)):
        path = data.PickValueInList(list(places(body)))
        body = changed(body, path, data.PickValueInList(list(HOWS)), value(data))
    check(DIALECT, body, params)


if __name__ == "__main__":
    atheris.Setup([sys.argv[0], *sys.argv[2:]], one_input)
    atheris.Fuzz()
