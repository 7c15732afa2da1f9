"""One operation: run the recurrence of one layer in one direction over a sequence."""
