"""Compiled code: `native` in C for the CPU, `gpu` in Triton. Tests compare each with plain operations."""
