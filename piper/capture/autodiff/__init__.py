"""Gives each chunk its forward and backward code."""
