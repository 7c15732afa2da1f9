"""Experiments: what is trained to show something."""
