"""Compiles a job into a proven program: trace, directives, differentiation, lowering, proof."""

from piper.compiler.build import Program as Program
from piper.compiler.build import compile as compile
