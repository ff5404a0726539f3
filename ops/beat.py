"""Celery beat's clock, which says in one line what it could not send. Its own would add a page of stack for each task."""

from __future__ import annotations

import logging
from typing import Any

import celery.beat

logger = logging.getLogger(__name__)


class Scheduler(celery.beat.Scheduler):
    """Keeps its schedule in memory: a missed run needs no repetition."""

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        try:
            self.apply_async(entry, producer=producer, advance=False)
        except celery.beat.SchedulingError as error:
            logger.warning("%s", error)
