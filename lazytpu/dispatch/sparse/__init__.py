"""Sparse tensors of torch's layouts COO, CSR and CSC, with indices and values on the device.

The tensor is torch's own, made by torch's C++ (its `SparseTensorImpl`), so autograd, `is_coalesced`, `.grad` of
parameters and optimizers see what they see on a CPU.  What is here are the kernels for it:

    parts           takes sparse tensors apart and makes them
    positions       where each value of a result comes from, found by the CPU's own op on the indices alone
    coo, compressed the kernels that move values
    pointwise       functions of the values, sums and products element by element
    products        products of matrices
    conversions     to and from dense tensors

Values stay on the device and are recorded: gathered by position, or added up by segment.  Indices are read where the
number of non-zeros depends on them, which cuts as any read does.
"""
