"""Simulated engines and conversations that the choice of paths is tried on."""
