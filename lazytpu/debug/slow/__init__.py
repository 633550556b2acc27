"""Say why a step is slow: where its time goes, the costliest lines, and what of it could be saved.

steady.py       the mean of the last steps: recording, cutting, waiting, the device
weights.py      what an op costs on the device, estimated
costly_lines.py the lines that cost most, on the side that is the limit
findings.py     what could be saved, each with its line and fix, the costliest first
graph_costs.py  of these: dtypes and memory layouts that cost
account.py      all of it as text for `lazytpu.explain` and as a table for the report
"""
