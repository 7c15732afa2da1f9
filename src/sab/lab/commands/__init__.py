"""The commands of `sab`: each parses, calls, prints, and returns an exit status."""

from sab.extras import require

require("tyro", "rich")
