"""Figures of a trace: what each step read, and the paths by which credit came back.

Every function returns a matplotlib `Figure`, which `figure.savefig("figure.pdf")` writes. With `ax` it draws into the
given axes and returns the figure that they are part of. matplotlib comes with the extra `report`.
"""

from sab.extras import require

require("matplotlib")

from sab.plot.traces import attention, credit_paths

__all__ = ["attention", "credit_paths"]
