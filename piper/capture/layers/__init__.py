"""Finds the repeated layers of a model, and captures a deep model from few of them."""
