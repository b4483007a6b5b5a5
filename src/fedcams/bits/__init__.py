"""Bit-level work on vectors: packing, entropy coding, exact selection, seeded sampling. Nothing here is federated."""
