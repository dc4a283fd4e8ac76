"""Kernels in Triton, for GPUs: at most four launches a layer.

tiles      how much of a step one program takes, by the shape of the heads
plan       a step's layout as the integers that the kernels are told
kernels    store, attend, merge
launch     with which arguments they are started
backend    them as a backend
"""
