"""Triton kernels over whole cohorts; imported where they are used, since not every torch has Triton."""
