"""What runs inside the engine's process. Imports vLLM lazily; nothing outside the engine imports it."""
