"""Offline data from results: which sessions are taken, what is made of them, in which split and file it ends.

    read results twice → filters → a kind's picks → rows → a split's file → manifest

Reads results as `polar.client` gives them and knows no network; needs none of the server. The command is
`polar.cli.export`.
"""

from __future__ import annotations

from polar.exporting.filters import Filters
from polar.exporting.kinds import KINDS, Kind, Preference, Rejection, Sft
from polar.exporting.run import Exported, export
from polar.exporting.split import Split, SplitError

__all__ = ["KINDS", "Exported", "Filters", "Kind", "Preference", "Rejection", "Sft", "Split", "SplitError", "export"]
