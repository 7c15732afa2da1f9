"""An extension of Griffe: the API page shows the default of an option, where the code refers to SABConfig's."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import griffe

from sab.config import SABConfig

DEFAULTS = {f"SABConfig.{field.name}": repr(field.default) for field in fields(SABConfig)}


class RealDefaults(griffe.Extension):
    """Replaces `k_top: int = SABConfig.k_top` by `k_top: int = 10`."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Called for every function that was read."""
        for parameter in func.parameters:
            parameter.default = DEFAULTS.get(str(parameter.default), parameter.default)
