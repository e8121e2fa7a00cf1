"""One environment for every test: eight CPU devices, exact products, strict shapes, no network, few threads.

The environment is set before jax, torch or libtpu is imported; conftest is the first file that pytest loads.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # with libtpu installed, jax would look for a TPU first
    # Most of a first run is compilation, and what is compiled runs for milliseconds: less of LLVM's optimization.
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "TPU_SKIP_MDS_QUERY": "1",  # compiling for a TPU topology asks no metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # libtpu otherwise locks out the second test process
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # torch and BLAS: the models are tiny and the test processes share the cores
    "MKL_NUM_THREADS": "1",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import jax  # noqa: E402  (after the environment)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
# Most of a run is compilation; a second run on the same machine takes it from here.
# JAX_ENABLE_COMPILATION_CACHE=false turns it off.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
