"""Triton kernels over whole cohorts; imported only where they are used, because not every torch has Triton."""
