"""`gunicorn workers.proxy:app -k uvicorn_worker.UvicornWorker --keep-alive 75 -b 127.0.0.1:8100` — a node's proxy."""

from polar import log, tracing
from polar.proxy.shared import share
from polar.settings import Settings

settings = Settings.load()
log.configure(settings.log_level, settings.log_format)
tracing.configure(settings.otel_endpoint, "polar-proxy")
share(settings)

from polar.proxy.app import create_app  # noqa: E402 - what counts finds the folder when it is imported

app = create_app(settings)
