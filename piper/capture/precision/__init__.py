"""Products in a narrower type than the model's."""
