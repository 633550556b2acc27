"""Run graphs: compile them, keep their executables in memory and on disk, start them, move data."""
