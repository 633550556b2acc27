"""Executing: compiled graphs, buffers, and what runs when a graph is cut."""
