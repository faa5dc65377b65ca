"""What the light commands do: those that need neither a model nor a network."""
