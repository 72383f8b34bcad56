"""What makes `celery -A polar` work: Celery looks here for the app. The app itself stands in `workers/`."""

from workers.beat import app

__all__ = ["app"]
