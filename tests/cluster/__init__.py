"""A real one-node Kubernetes for the tests and for people, built from pinned sources."""
