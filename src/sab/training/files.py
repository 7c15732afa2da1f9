"""What runs are written with; see `sab.files`, which lies below everything that writes."""

from __future__ import annotations

from sab.files import replacing, sync, write_text, writing

__all__ = ["replacing", "sync", "write_text", "writing"]
