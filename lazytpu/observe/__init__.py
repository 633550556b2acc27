"""Reporting: what happened, counted and traced to lines, for `explain`, metrics and logs."""
