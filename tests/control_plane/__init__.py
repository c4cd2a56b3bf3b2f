"""The operator and its resource on a real API server; no pod runs."""
