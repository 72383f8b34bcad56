"""`gunicorn workers.api:app -k workers.serving.patience.Worker --threads 8` — the REST API and the pages."""

from polar import log, tracing
from polar.api import create_app
from polar.settings import Settings
from workers.job import CeleryDispatcher

settings = Settings.load()
log.configure(settings.log_level)
tracing.configure(settings.otel_endpoint, "polar-api")
app = create_app(settings, CeleryDispatcher())
