"""Whether time and memory grow as they should:  python -m benchmarks.growth [--only NAME] [--plot DIR]

Times are of the processor, of all threads of the process, so that a busy machine changes them little.
"""
