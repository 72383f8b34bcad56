"""The one error of the embedded servers.

Its message is shown to the user as it is, so it always says what to do next. How it is shown is the command line's
business.
"""

from polar.errors import PolarError


class EmbeddedError(PolarError, RuntimeError):
    """An embedded server or the supervisor cannot go on; the message names the next step."""
