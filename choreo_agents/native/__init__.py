"""Kernels in C for CPUs, loaded without torch's C++ interface: any torch will do, and none is fine.

segments.c       attention of a step: one call a layer for all that it reads, rotates and merges
linear.c         products with a layer's weights, a row's the same bit by bit in any company
decoder.c        a whole decoder layer, of these
native.h         what they are told; vectors.h, how they compute
structs          the same for Python
build_hook.py    compiles them when the package is built, or installed from its sources
library          finds them, and says why they cannot be used
"""
