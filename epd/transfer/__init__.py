"""Moving embeddings and KV blocks between replicas: contracts and implementations."""
