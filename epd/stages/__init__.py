"""What a replica does in its roles, and the life of a request across replicas."""
