"""`gunicorn workers.proxy:app -k uvicorn_worker.UvicornWorker --keep-alive 75 -b 127.0.0.1:8100` — a node's proxy."""

import gc

from polar import log, tracing
from polar.proxy.shared import share
from polar.settings import Settings

settings = Settings.load()
log.configure(settings.log_level, settings.log_format)
tracing.configure(settings.otel_endpoint, "polar-proxy")
share(settings)

from polar.proxy.app import create_app  # noqa: E402 - what counts finds the folder when it is imported

app = create_app(settings)
# A call makes thousands of objects and hardly a cycle. At the interpreter's own thresholds the collector would go over
# the young ones ten times a call, and ever again over the modules, which never go.
gc.freeze()
gc.set_threshold(20_000, 20, 20)
