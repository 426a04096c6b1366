"""How much host memory does importing a model take besides the model itself?

    python -m benchmarks.import_memory [--megabytes 300] [--devices 1]

A random checkpoint of that size, in shards, is loaded in float32 and in bfloat16. `peak` is the
most private memory (RssAnon of /proc/self/status, sampled every 0.2 ms) above what the process had
before, `result` what the parameters take, `over` the difference: what an import takes besides. With
several (virtual CPU) devices the parameters are split over them. The last line is JSON.
"""

import argparse
import gc
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from memcalib_jax import models
from memcalib_jax.models.rope import Rope

SHARD_COUNT = 5  # about as many weights files has a checkpoint


def private_bytes() -> int:
    """Returns what the process holds that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


class Peak:
    """Samples the private memory in a thread while the block runs."""

    def __enter__(self):
        gc.collect()
        self.start = self.most = private_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self):
        while not self._done.is_set():
            self.most = max(self.most, private_bytes())
            time.sleep(0.0002)

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()


def config_of_size(megabytes: float) -> models.ModelConfig:
    """Returns a llama whose bfloat16 weights take about that much."""
    width = 256
    layer = 2 * (4 * width * width + 3 * width * 4 * width)
    vocabulary = 4096
    layers = max(2, round((1e6 * megabytes - 2 * vocabulary * width) / layer))
    return models.ModelConfig(
        family="llama", vocab_size=vocabulary, hidden_size=width, intermediate_size=4 * width,
        num_layers=layers, num_heads=4, num_kv_heads=4, head_dim=64, rope=Rope())


def write_checkpoints(folder: Path, megabytes: float):
    """Writes random bfloat16 weights in shards: `small` and, of that size, `large`."""
    random = np.random.default_rng(0)
    for name, size in (("small", 5), ("large", megabytes)):
        config = config_of_size(size)
        params = jax.tree.map(
            lambda shape: random.standard_normal(shape, np.float32).astype(jnp.bfloat16),
            config.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple))
        total = sum(x.nbytes for x in jax.tree.leaves(params))
        models.save(folder / name, params, config, max_shard_bytes=total // SHARD_COUNT)


def shardings_of(config: models.ModelConfig) -> dict | None:
    """Splits every parameter's last divisible axis over all devices; None with one device."""
    devices = jax.devices()
    if len(devices) == 1:
        return None
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))

    def split(shape):
        axes = [i for i in range(1, len(shape)) if shape[i] % len(devices) == 0]
        spec = ["data" if i in axes[-1:] else None for i in range(len(shape))]
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    return jax.tree.map(split, config.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple))


def measure(folder: Path, dtype: str, devices: int) -> dict:
    """Loads the large checkpoint; returns sizes in MB and the time in seconds."""
    jax.config.update("jax_num_cpu_devices", devices)
    # What the first load of a process allocates, once, is no part of the model.
    models.load(folder / "small", dtype=dtype)
    folder = folder / "large"
    shardings = shardings_of(models.load_config(folder))
    with Peak() as peak:
        start = time.perf_counter()
        params, _ = models.load(folder, dtype=dtype, shardings=shardings)
        seconds = time.perf_counter() - start
    result = sum(x.nbytes for x in jax.tree.leaves(params))
    largest_shard = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {"dtype": dtype, "devices": devices, "result": result / 1e6,
            "largest_shard": largest_shard / 1e6, "peak": (peak.most - peak.start) / 1e6,
            "over": (peak.most - peak.start - result) / 1e6, "seconds": seconds}


def in_a_process_of_its_own(function, *arguments):
    """Calls a function where no memory is left over from something else."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=300, help="size in bfloat16")
    parser.add_argument("--devices", type=int, default=1, help="virtual CPU devices")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        in_a_process_of_its_own(write_checkpoints, folder, arguments.megabytes)
        rows = [in_a_process_of_its_own(measure, folder, dtype, arguments.devices)
                for dtype in arguments.dtypes]
    print(f"{'dtype':<10}{'result':>10}{'largest shard':>15}{'peak':>10}{'over':>8}  MB")
    for row in rows:
        print(f"{row['dtype']:<10}{row['result']:>10.1f}{row['largest_shard']:>15.1f}"
              f"{row['peak']:>10.1f}{row['over']:>8.1f}")
    print(json.dumps({"rows": rows, "jax": jax.__version__, "python": sys.version.split()[0]}))


if __name__ == "__main__":
    main()
