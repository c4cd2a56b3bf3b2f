"""The API server as the operator uses it: requests, kinds of objects, and what is known of them. Start with ``api``."""
