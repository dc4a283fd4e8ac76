"""Attention kernels in Triton, for GPUs: at most four launches per layer.

tiles      how much of a step one program takes, by the shape of the heads
plan       a step's layout as the integers that kernels read
kernels    store, attend, merge
launch     starts the kernels
backend    implements `AttentionBackend`
"""
