"""Triton kernels on the paged KV cache, for CUDA and ROCm.

Each kernel's file holds the kernel and the wrapper that checks its operands; ``reference`` holds the same in float64
torch. Importing this package loads no triton: import the kernel's own module.
"""
