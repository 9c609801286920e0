"""Your data: `--task file:PATH` and `ucr:NAME`. Skip it at a first reading.

read.py has a function per format; table.py and columns.py read tables, first lines, then columns;
cells.py knows single cells; questions.py asks what a file does not say, in one line that names the
answers; split.py makes targets and splits; task.py normalises, encodes and saves."""
