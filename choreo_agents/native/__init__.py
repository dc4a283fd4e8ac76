"""Kernels in C for CPUs, loaded by ctypes: they work with any torch, and are optional.

segments.c       attention of a step: one call per layer reads, rotates and merges everything
linear.c         products with a layer's weights; a row's result is the same, bit by bit, in any batch
decoder.c        a whole decoder layer, made of these
draw.c           draws tokens
native.h         structures of their arguments; vectors.h: vector operations
structs          the structures for Python
build_hook.py    compiles them when the package is built, or installed from its sources
library          loads them, or says why they cannot be used
"""
