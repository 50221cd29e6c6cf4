"""`python -m piper`: the command line."""

from piper.cli import main

if __name__ == "__main__":
    main()
