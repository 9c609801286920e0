#!/usr/bin/env bash
# Train the missing runs of a table or figure, then show it: bash run_all.sh --help
here=$(cd "$(dirname -- "$0")" && pwd)
PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} exec python -P -m experiments.running "$@"
