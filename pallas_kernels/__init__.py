"""Arrays in, arrays out: one folder an operation, its plain reference beside its kernels. Knows no model.

Kernels for GPUs say by which of Pallas' routes they are lowered. Triton's is deprecated since jax 0.11, and Mosaic GPU
is to follow it. Where shared memory, filled ahead by asynchronous copies, makes a kernel faster, it is Mosaic's
(`gated_delta.mosaic`, measured against its twin by Triton); those that read their input once, in order, and keep a few
sums are near the memory's rate by Triton, in a tenth of the text.
"""
