"""Attention by a kernel in C, for CPUs: one call a layer for all that a step reads, rotates and merges.

plan       a layout as the integers that the kernel is told
backend    the kernel as a backend
"""
