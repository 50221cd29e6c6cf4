"""Captures a model: one traced forward and loss, cut into chunks with explicit forward and backward code."""
