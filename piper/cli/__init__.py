"""The command line: one file for each verb."""

from piper.cli.application import app as app
from piper.cli.application import main as main
