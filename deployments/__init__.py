"""The only package that imports Ray: pools, the ingress, routing to one replica, and the ``epd`` command."""
