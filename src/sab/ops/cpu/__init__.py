"""The CPU backend: loops over time in C++, compiled once on each machine."""
