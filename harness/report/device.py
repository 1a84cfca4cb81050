"""The machine that a run's figures depend on, and the class of machines whose figures may be compared."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from harness.errors import EvidenceError

__all__ = ["cores", "device_class", "machine", "processor"]

_UNKNOWN = "unknown"

_ISA = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
"""The processor flags that choose an engine's CPU kernels, as /proc/cpuinfo spells them on x86-64 and arm64."""


def machine() -> dict[str, Any]:
    """Return what the figures depend on: processor, cores, memory, system, the GPUs that are visible, their driver.

    `cores` is what the run may use, a fraction where a quota says so. `cpu_flags` and `gpus` are None where they cannot
    be known, and `cpu` is then "unknown", `driver` "unknown" and why.
    """
    try:
        model, flags = processor(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except OSError:
        model, flags, memory = _UNKNOWN, None, 0
    gpus, driver = _gpus()
    return {
        "cpu": model,
        "cpu_flags": flags,
        "cores": cores(Path("/proc/self")),
        "memory_bytes": memory,
        "gpus": gpus,
        "driver": driver,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def processor(cpuinfo: str) -> tuple[str, list[str] | None]:
    """Return the processor's model and those of its flags that choose kernels, from the text of /proc/cpuinfo.

    On arm64, which states no name, the model is the implementer and the part of each kind of core, in hex as `lscpu`
    reads them. "unknown" and None where the text says nothing.
    """
    rows = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in cpuinfo.splitlines())]
    said: dict[str, list[str]] = {}
    for name, value in rows:
        said.setdefault(name, []).append(value)
    kinds = dict.fromkeys(zip(said.get("CPU implementer", ()), said.get("CPU part", ()), strict=False))
    named = [f"implementer {implementer}, part {part}" for implementer, part in sorted(kinds)]
    model = " and ".join(named) or next(filter(None, said.get("model name", ())), _UNKNOWN)
    flags = next(iter([*said.get("flags", ()), *said.get("Features", ())]), None)
    return model, None if flags is None else [name for name in _ISA if name in flags.split()]


def cores(process: Path) -> int | float:
    """Return how many cores this process may keep busy: its affinity or, if that is less, the quota of its cgroups.

    A quota (`docker run --cpus`, a limit in Kubernetes) takes no core out of the affinity. `process` is its folder
    under /proc. Files as the kernel documents them: `cpu.max` (Documentation/admin-guide/cgroup-v2.rst),
    `cpu.cfs_quota_us` and `cpu.cfs_period_us` (Documentation/scheduler/sched-bwc.rst).
    """
    allowed = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):
        mounts, groups = (
            (process / name).read_text(encoding="utf-8", errors="replace").splitlines()
            for name in ("mountinfo", "cgroup")
        )
        # "0::/group" is of version 2; "1:cpu,cpuacct:/group" of version 1.
        paths = {name: path for _, names, path in (line.split(":", 2) for line in groups) for name in names.split(",")}
        for mount in mounts:
            left, _, right = mount.partition(" - ")
            root, place = left.split(" ")[3:5]
            kind, _, options = right.split(" ")[:3]
            controller = {"cgroup2": "", "cgroup": "cpu"}.get(kind)
            if controller not in paths or controller not in ("", *options.split(",")):
                continue
            # In a container the mount may begin at its own group, of which the path speaks as the host sees it.
            group = PurePosixPath(paths[controller])
            inner = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
            inner = PurePosixPath() if ".." in inner.parts else inner
            allowed = min(allowed, *(_quota(Path(place) / each) for each in (inner, *inner.parents)))
    allowed = round(allowed, 2)
    return int(allowed) if allowed.is_integer() else allowed


def _quota(group: Path) -> float:
    """Return the cores' worth of time that a control group allows; infinite if it sets no limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
            quota, period = map(float, " ".join((group / name).read_text(encoding="ascii") for name in names).split())
            if quota > 0 and period > 0:
                return quota / period
    return math.inf


def _gpus() -> tuple[list[str] | None, str]:
    """Return the names of the GPUs that CUDA_VISIBLE_DEVICES leaves, and the driver; None and why if unknown.

    CUDA numbers GPUs from the fastest to the slowest unless CUDA_DEVICE_ORDER is PCI_BUS_ID, nvidia-smi by bus (CUDA
    C++ Programming Guide, "CUDA Environment Variables"). Where all have one name, that makes no difference.
    """
    query = ["nvidia-smi", "--query-gpu=index,uuid,driver_version,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
        rows = [line.split(", ", 3) for line in done.stdout.splitlines() if line.strip()]
        gpus = {(index, uuid): name for index, uuid, _, name in rows}
        driver = rows[0][2]
    except FileNotFoundError:
        return None, "unknown: there is no nvidia-smi"
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return None, f"unknown: nvidia-smi: {error!r}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(gpus.values()), driver
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(set(gpus.values())) == 1
    chosen: list[str] = []
    for asked in filter(None, (word.strip() for word in visible.split(","))):
        if asked.isdecimal() and not by_bus:
            return None, (
                f"unknown: CUDA_VISIBLE_DEVICES={visible} counts from the fastest GPU, and the GPUs differ: "
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name them by UUID"
            )
        # An UUID may be shortened, as CUDA allows.
        names = [name for (index, uuid), name in gpus.items() if asked == index or uuid.startswith(asked)]
        if len(names) != 1:
            return None, f"unknown: CUDA_VISIBLE_DEVICES={visible}, and nvidia-smi lists no such GPU"
        chosen += names
    return chosen, driver


def device_class(machine: Mapping[str, Any], device: str) -> str:
    """Return what must be alike for two figures to be compared: processor, cores and kernels' flags, or the GPUs.

    `machine` is a record's, `device` "cpu" or "cuda". Raises EvidenceError where the machine does not say.
    """
    if device == "cuda":
        if not machine.get("gpus"):
            raise EvidenceError(
                f"the GPU is unknown ({machine.get('driver', 'an older record')})",
                remedy="make nvidia-smi available where the run is started, and CUDA_VISIBLE_DEVICES (if it is set) "
                "name GPUs that it lists; then run again",
            )
        counts = collections.Counter(machine["gpus"])
        return "cuda: " + ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
    model, flags, count = (machine.get(name) for name in ("cpu", "cpu_flags", "cores"))
    if model in (None, "", _UNKNOWN) or flags is None or not count:
        raise EvidenceError(
            "the processor, its flags or its cores are unknown (/proc/cpuinfo does not say, or an older record)",
            remedy="run again, on a machine whose /proc/cpuinfo names the processor",
        )
    return f"cpu: {model}, {count} cores, {' '.join(flags) or 'no vector flags'}"
