"""Learning while a sequence runs: `Learner`, and what its predictions go back to."""

from sab.online.learner import Credited, Learner, Receipt, Step

__all__ = ["Credited", "Learner", "Receipt", "Step"]
