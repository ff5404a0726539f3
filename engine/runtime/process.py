"""The engine process from start to exit: its workers first, which take longest, then all else, which runs while they load.

Exit codes tell a supervisor what to do: 0 was told to stop, 78 (EX_CONFIG) will fail again the same way, 75 (EX_TEMPFAIL) was
fenced or lost Redis and should start again, 1 anything else.
"""

from __future__ import annotations

import faulthandler
import logging
import signal

from engine.bus.call import BusUnavailable, Fenced, UnfitRedis
from engine.config import EngineConfig
from engine.runtime.capacity import DoesNotFit
from engine.runtime.progress import Progress
from engine.runtime.stop_signals import StopSignals
from engine.runtime.workers import make_executor
from gpu.errors import CheckpointError, UnsupportedConfiguration
from gpu.executor import WorkerError

logger = logging.getLogger(__name__)

EXIT_CONFIG = 78
EXIT_TEMPORARY = 75


def run_engine(config: EngineConfig, progress_fd: int | None = None, shutdown_timeout: float = 0.0) -> int:
    """Serve one model on the Redis of `config.redis` until a signal; returns the exit code."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # by the supervisor's watchdog, or by hand
    progress = Progress(progress_fd)
    signals = StopSignals(shutdown_timeout)
    try:
        executor = make_executor(config)
        try:
            executor.launch()
            from engine.runtime.serving import serve  # when the workers have begun: its imports take time

            serve(config, executor, progress, signals)
            return 0
        finally:
            executor.shutdown()
    except (DoesNotFit, CheckpointError, UnfitRedis, UnsupportedConfiguration) as error:
        logger.error("%s", error)
        progress.say("failed", message=str(error), permanent=not isinstance(error, DoesNotFit))
        return EXIT_CONFIG
    except (Fenced, BusUnavailable) as error:
        logger.error("the engine was fenced or lost Redis: %s", error)
        progress.say("failed", message=str(error), permanent=False)
        return EXIT_TEMPORARY
    except WorkerError as error:
        logger.error("%s", error)
        progress.say("failed", message=str(error), permanent=error.permanent)
        return EXIT_CONFIG if error.permanent else 1
