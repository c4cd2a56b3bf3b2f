"""The truth test: adversarial turns, whose texts have to be those of a model that never reuses anything."""
