"""`python -m sab` is the command `sab`."""

from __future__ import annotations

import sys

from sab_cli import main

if __name__ == "__main__":
    sys.exit(main())
