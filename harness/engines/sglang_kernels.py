from pathlib import Path

KERNELS = Path(__file__).with_name("sglang_cpu")
