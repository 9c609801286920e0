"""Comparing runs. A first reading skips this folder.

runs.py: one table of runs, a row each, and which runs are seeds of one variant. statistics.py:
differences and how sure they are. settings.py: any runs, one row per setting. comparisons.py,
verdict.py and report.py: your data and the demos, with a verdict in words. paper.py: the paper's
tables and claims. drawing.py: Markdown and figures. curves.py: curves of single runs. `python
analyze.py` calls them."""
