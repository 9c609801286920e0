"""Experiments: what every table, figure and demo trains (entries.py), and `bash run_all.sh`, which
trains it (running.py). To train one model, skip them."""
