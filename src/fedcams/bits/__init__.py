"""Bit-level work on vectors: packing, entropy coding, exact selection, seeded sampling. Knows nothing of federation."""
