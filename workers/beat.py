"""`celery -A polar worker -Q sweep -B -c 4` — the clock: sweeps, and owed webhooks, on their own small worker.

The work stands in `polar/sweep.py` and `polar/delivery/`; one of these is enough, several do no harm.
"""

from __future__ import annotations

from celery.schedules import schedule

from polar import clock
from polar.api import wire
from polar.delivery.callbacks import deliver_due
from polar.sweep import sweep as sweep_once
from workers.job import SWEEP_QUEUE, CeleryDispatcher, app, database, settings

SWEEP_SECONDS = 3.0
DELIVER_SECONDS = 2.0


@app.task(name="polar.sweep", expires=SWEEP_SECONDS)
def sweep() -> None:
    sweep_once(database(), CeleryDispatcher())


@app.task(name="polar.deliver", expires=DELIVER_SECONDS)
def deliver() -> None:
    deliver_due(database(), wire.callback_body, settings.webhook_secret, settings.callback_allow)


def every(seconds: float) -> schedule:
    """By a clock that nobody can set: by the wall clock, one that is set back would stop the sweeper for so long."""
    return schedule(seconds, nowfun=clock.now)


# In memory: a file would only keep when it ran last, and a wrong clock's word for that would stop it.
app.conf.beat_scheduler = "celery.beat:Scheduler"
app.conf.beat_schedule = {
    "sweep": {
        "task": "polar.sweep",
        "schedule": every(SWEEP_SECONDS),
        "options": {"queue": SWEEP_QUEUE, "expires": 10},
    },
    "deliver": {
        "task": "polar.deliver",
        "schedule": every(DELIVER_SECONDS),
        "options": {"queue": SWEEP_QUEUE, "expires": 10},
    },
}
