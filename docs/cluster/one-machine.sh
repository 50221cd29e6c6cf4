#!/bin/bash
# Trains a recipe on the GPUs of this machine.
# usage: bash one-machine.sh RECIPE RUN [options of piper train]
set -euo pipefail
recipe=$1 run=$2
shift 2

piper plan "$recipe" > /dev/null  # proven, or the reason why not, before a GPU is touched
piper train "$recipe" --out "$run" --resume "$@"
