"""Memory that outlives a step: KV blocks, the prefix cache over them, and embeddings."""
