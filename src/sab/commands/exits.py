"""The exit statuses of `sab`."""

from __future__ import annotations

DONE, DIVERGED, MISTAKEN, INTERRUPTED, UNHEARD = 0, 1, 2, 130, 141
FAILED = DIVERGED
