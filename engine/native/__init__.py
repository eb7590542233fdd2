"""C++ kernels for the CPU, built on first use; the torch ways stay beside them, for where there is no compiler."""
