"""The report: one self-contained HTML file about runs and records, and the same page kept fresh while a run trains."""
