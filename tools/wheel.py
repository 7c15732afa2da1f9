"""Checks an installed wheel that has the compiled CPU backend, as cibuildwheel does with each that it builds."""

from __future__ import annotations

import sys

from sab.lab import doctor
from sab.ops.cpu import loader


def main() -> int:
    """Whether the library is the wheel's own and computes what the reference does."""
    origin = loader.library().origin
    findings = {finding.name: finding for finding in doctor.examine()}
    sys.stdout.write(f"{origin}; {findings['cpu on cpu'].message}\n")
    return 0 if origin.startswith(loader.PACKAGED) and findings["cpu on cpu"].state == "works" else 1


if __name__ == "__main__":
    sys.exit(main())
