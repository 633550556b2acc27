"""Tensors and functions shared with jax and, by DLPack, with other libraries."""
