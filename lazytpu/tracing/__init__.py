"""Recording: from a call of an aten op to a node of the trace tree."""
