"""The commands of `sab`: each parses, calls, prints, and gives an exit status."""
