"""The parts of the method: cells, scorers, weightings, incorporations."""
