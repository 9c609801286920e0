"""Experiments: what every table, figure and demo trains, and the code that runs it. To train one
model, skip it.

entries.py: one entry per table, figure or demo. commands.py: the commands of an entry, and what
result.json will say. sweep.py: any combination of flags. running.py: `bash run_all.sh`."""
