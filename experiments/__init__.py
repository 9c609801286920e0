"""Experiments: what every table, figure and demo trains, and the code that runs it. To train one
model, skip it.

entries.py: one entry per table, figure or demo. sweep.py: any combination of flags. commands.py:
the commands of an entry, and what result.json will say. pool.py: runs side by side. running.py:
`bash run_all.sh`."""
