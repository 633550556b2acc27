"""Kernels: what torch calls for each aten op on the device."""
