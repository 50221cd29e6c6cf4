"""The command line: one file for each verb."""

from piper.cli.application import app_with as app_with
from piper.cli.application import main as main
