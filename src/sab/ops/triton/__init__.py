"""The Triton backend: GPU kernels for the two loops over time."""
