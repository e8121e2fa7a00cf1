"""Arrays in, arrays out: one folder an operation, its plain reference beside its kernels. Knows no model."""
