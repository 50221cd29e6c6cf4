"""The loop around steps: data, metrics, checkpoints, a folder for each run, and a display."""
