"""Pure builders of the children, one module a kind or group of kinds. Every call returns fresh dictionaries."""
