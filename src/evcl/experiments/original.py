"""Imported by the process that worker processes are copies of: it imports what they need, once, and outlives a SIGTERM
to all processes of a run, so that the workers can save their checkpoints. It ends with the process that started it.
"""

from __future__ import annotations

import signal

# First, so that threads inherit it. A copy takes the signal when it is ready for it: see `_work`.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

import evcl.experiments.engines  # noqa: E402, F401
