"""Captures a deep model from few of its layers."""
