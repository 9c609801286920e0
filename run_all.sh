#!/usr/bin/env bash
# Trains what a table or figure needs and shows it: bash run_all.sh --help
here=$(cd "$(dirname -- "$0")" && pwd)
PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} exec python -P -m experiments.running "$@"
