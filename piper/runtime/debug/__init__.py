"""Records steps, next to the executor, and slows them down as a network would."""
