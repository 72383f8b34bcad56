"""What dead workers left on a node that no row names: sandboxes with our label, and prepared states beyond bounds.

A session's row names each of its runtimes before it starts, and whoever ends the session removes what it names.
Here are the rest: a container that was made just as its session was cancelled, or whose row is gone.
"""

from __future__ import annotations

import logging

from sqlalchemy import Engine, select
from sqlalchemy.exc import SQLAlchemyError

from polar import lanes, runtimes
from polar.db import transaction
from polar.errors import RuntimeFault
from polar.log import line
from polar.models import RolloutSession
from polar.runtimes import Orphan
from polar.settings import Settings
from polar.spec import RuntimeSpec
from polar.stages import prepared
from polar.stages.prewarm import home_label

logger = logging.getLogger(__name__)


def found(database: Engine, settings: Settings) -> list[Orphan]:
    """Sandboxes of this Polar home on this node that nothing names any more."""
    seen: list[Orphan] = []
    for name in runtimes.RUNTIMES:
        try:
            seen += runtimes.runtime_class(RuntimeSpec(backend=name)).orphans(home_label(settings))
        except RuntimeFault as fault:
            logger.warning(line("orphans not listed", runtime=name, cause=fault.message))
    if not seen:
        return []
    with transaction(database) as db:
        rows = db.execute(
            select(RolloutSession.id, RolloutSession.runtimes).where(
                RolloutSession.id.in_({each.session_id for each in seen})
            )
        ).all()
    named = {handle["workspace"] for _, handles in rows for handle in handles.values()}
    named |= {str(path) for path in prepared.half_made(settings.prepared_folder)}
    return [each for each in seen if str(each.workspace) not in named]


def sweep(database: Engine, settings: Settings, node_id: str) -> int:
    """Remove orphans, and prepared states beyond the bounds, or all of them on a node that drains; how many."""
    gone = 0
    try:
        for each in found(database, settings):
            each.destroy()
            gone += 1
            logger.info(line("orphan removed", session=each.session_id, workspace=each.workspace))
        with transaction(database) as db:
            draining = lanes.draining(db, node_id)
        gone += prepared.trim(settings.prepared_folder, prepared.Bounds.of(settings), everything=draining)
    except (RuntimeFault, SQLAlchemyError) as error:
        logger.warning(line("orphans not removed; tried again later", error=error))
    return gone
