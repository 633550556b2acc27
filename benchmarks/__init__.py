"""Measurements of lazytpu, beside its peers and of how it grows.

Run from the root of the repository:

    python -m benchmarks               everything that the two pages on performance show, and the pages themselves
    python -m benchmarks.compare       training steps, beside eager, inductor, jax and torch_xla
    python -m benchmarks.record        the cost of recording one op
    python -m benchmarks.growth        whether time and memory grow as they should
    python -m benchmarks.allocation    what fresh pages cost, and what is done about them
    python -m benchmarks.cpu_lowerings beside eager and jax, ops that are lowered in ways of their own on CPUs
    python -m benchmarks.attention_blocks, python -m benchmarks.conv_lowerings, python -m benchmarks.integer_conv,
    python -m benchmarks.sort_lowerings, python -m benchmarks.recurrent
                                       the measurements behind the choice of lowerings
    python -m benchmarks.gpu_check     what to run on a machine with a GPU
"""
