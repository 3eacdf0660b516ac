"""CUDA kernels (CuPy, compiled at run time) with a torch twin each, and the pinned memory pool. Not there
yet.
"""
