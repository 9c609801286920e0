"""Your data: `--task file:PATH` and `ucr:NAME`. Skip it at a first reading.

read.py has a function per format; table.py and columns.py read tables, first lines, then columns;
cells.py knows single cells; split.py makes targets and splits; task.py normalises, encodes, saves.
What a file does not say is a question in one line. results/own.md answers it."""
