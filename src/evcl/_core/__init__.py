"""Basics that every other package uses: errors, settings, tasks, randomness, files. Internal: nothing here is public.

In: what a user hands in, and files. Out: checked tensors, settings, generators, files written as a whole, errors of
one line.
To change: limits (`bounds.py`; `tests/safety/test_bounds.py` writes their table). Fixed: the purposes of random
numbers, as every number of the library depends on them (`tests/test_randomness.py`). It imports no other package.
"""
