"""The exit statuses of `sab`."""

from __future__ import annotations

DONE, DIVERGED, USER_ERROR, INTERRUPTED, OUTPUT_CLOSED = 0, 1, 2, 130, 141
FAILED = DIVERGED
