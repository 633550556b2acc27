"""Count, time and log what happens: metrics, step statistics, logs, regions of profilers."""
