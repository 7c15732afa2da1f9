"""Learning while a sequence runs: `Learner`, and what its predictions go back to."""

from sab.online.learner import Learner, Receipt, Step

__all__ = ["Learner", "Receipt", "Step"]
