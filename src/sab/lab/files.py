"""Atomic writing of files, which the library has; here by the laboratory's name for it."""

from sab.files import replacing, sync, temporary_of, write_text, writing

__all__ = ["replacing", "sync", "temporary_of", "write_text", "writing"]
