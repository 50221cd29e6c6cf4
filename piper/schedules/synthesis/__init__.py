"""Schedule synthesis: search for a short pipeline schedule within a memory limit."""
