"""Experiments: what is trained to show something."""

from sab.extras import require

require("rich")
