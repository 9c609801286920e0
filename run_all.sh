#!/usr/bin/env bash
# Trains what a table or figure needs and shows it: bash run_all.sh --help
exec python "$(dirname -- "$0")/run_all.py" "$@"
