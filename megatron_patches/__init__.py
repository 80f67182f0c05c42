"""The method: frozen per-head orthonormal Query/Key projections for megatron-core attention."""
