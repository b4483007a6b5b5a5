"""Modules of torch that models are built from, one file per model; loaded when a model is built."""
