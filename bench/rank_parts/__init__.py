"""The parts of bench/ranks.py: each has `run(rank)`, called on every rank together.

What `run` returns on rank 0 becomes the part's JSON file; its `ok` is the verdict, its `text` the
lines of the summary.
"""
