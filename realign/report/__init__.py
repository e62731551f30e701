"""Reports of runs: one HTML file (`realign report`), a live viewer (`realign view`), a table (`realign compare`).

Everything here reads the files in the folders of runs, and changes none of them.
"""
