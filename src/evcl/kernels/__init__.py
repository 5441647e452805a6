"""Compiled code: `native` in C for the CPU, `gpu` in Triton. Tests compare each with plain operations.

In: buffers of weights and a batch. Out: the same numbers as `evcl.nn` computes, sooner; without a compiler, nothing
is lost.
To change: anything that `tests/training/test_native.py` and `test_kernels.py` accept: they compare with the plain
operations.
"""
