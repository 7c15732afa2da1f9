"""The laboratory: tasks, training, experiments, reports and the command line, on top of the library."""
