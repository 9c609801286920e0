"""Experiments: what every table, figure and demo trains, and running it. Whoever trains one model skips this room.

entries.py: an entry each. commands.py: from an entry to commands, and to what result.json will say. sweep.py: any
combination of flags. running.py: `bash run_all.sh`.
"""
