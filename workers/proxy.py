"""`gunicorn workers.proxy:app -k uvicorn_worker.UvicornWorker --keep-alive 75 -b 127.0.0.1:8100` — a node's proxy."""

from polar import log
from polar.proxy.app import create_app
from polar.settings import Settings

settings = Settings.load()
log.configure(settings.log_level)
app = create_app(settings)
