"""Many runs of the trainer that belong together: cells, running them, tables and figures.

`compare.py`, `ablate.py`, `plots.py` and `methods_table.py` are made of these parts:

  cells       one run of a grid: its choices, its directory, whether it is finished, its results
  settings    the command line: what is the same in all cells, and the axes of a grid
  accounting  how many local steps make methods comparable
  pool        runs cells as processes, each on cores of its own
  lock        keeps a second command away from the same directory
  child       such a process; it ends when the one that started it is gone
  progress    what is shown meanwhile, and the time left
  search      chooses a value for each row and column on validation images
  tables      means and deviations over seeds, in the paper's layout
  figures     curves and bars
"""
