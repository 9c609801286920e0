"""Comparing runs. A first reading skips this folder.

reading.py: what each run did, and which runs are seeds of one variant. statistics.py: differences
and how sure they are. settings.py: any runs, one row per setting. report.py: your data and the
demos, with a verdict in words. drawing.py: tables and figures. `python analyze.py` calls them."""
