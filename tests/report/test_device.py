"""The machine, and which machines' figures may be compared: unlike ones are never taken for equal."""

import os

import pytest

from harness.errors import EvidenceError
from harness.report.device import cores, device_class, machine, processor

MACHINE = {"cpu": "P", "cpu_flags": ["avx2"], "cores": 2, "gpus": ["H200", "H200"], "driver": "570.1"}


def test_machine():
    made = machine()
    assert 0 < made["cores"] <= len(os.sched_getaffinity(0))


def test_device_class():
    assert device_class(MACHINE, "cpu") == "cpu: P, 2 cores, avx2"
    assert device_class(MACHINE | {"cores": 1.5}, "cpu") == "cpu: P, 1.5 cores, avx2"
    assert device_class(MACHINE, "cuda") == "cuda: 2 x H200"


@pytest.mark.parametrize(
    ("change", "device"),
    [
        ({"gpus": None}, "cuda"),
        ({"gpus": []}, "cuda"),
        ({"cpu_flags": None}, "cpu"),
        ({"cpu": ""}, "cpu"),
        ({"cpu": "unknown"}, "cpu"),
        ({"cores": None}, "cpu"),
    ],
)
def test_what_is_unknown_is_no_device_class(change, device):
    with pytest.raises(EvidenceError, match="unknown"):
        device_class(MACHINE | change, device)


def test_what_a_record_lacks_is_no_device_class():
    for name in ("cpu", "cpu_flags", "cores"):
        with pytest.raises(EvidenceError, match="unknown"):
            device_class({key: value for key, value in MACHINE.items() if key != name}, "cpu")


X86 = "processor: 0\nmodel name\t: AMD EPYC\nflags\t: fpu avx2 bf16x\n\nprocessor: 1\nmodel name\t: AMD EPYC\n"
ARM = "processor\t: {}\nFeatures\t: fp asimd sve bf16\nCPU implementer\t: 0x41\nCPU part\t: {}\n"


@pytest.mark.parametrize(
    ("cpuinfo", "model", "flags"),
    [
        (X86, "AMD EPYC", ["avx2"]),
        (ARM.format(0, "0xd0c") + ARM.format(1, "0xd0c"), "implementer 0x41, part 0xd0c", ["asimd", "sve", "bf16"]),
        (
            ARM.format(0, "0xd41") + ARM.format(1, "0xd05"),
            "implementer 0x41, part 0xd05 and implementer 0x41, part 0xd41",
            ["asimd", "sve", "bf16"],
        ),
        ("processor: 0\nflags: avx2\n", "unknown", ["avx2"]),
        ("", "unknown", None),
    ],
)
def test_the_processor_is_named_or_unknown(cpuinfo, model, flags):
    assert processor(cpuinfo) == (model, flags)


V2 = "cgroup2 none rw"
V1 = "cgroup cgroup rw,cpu,cpuacct"


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Return a process on 16 cores, in a control group under a mount of which the files are given."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))

    def make(cgroup, root, mount, files):
        place = tmp_path / "cgroup"
        for name, text in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
        folder = tmp_path / "proc"
        folder.mkdir()
        (folder / "cgroup").write_text(f"2:memory:/elsewhere\n{cgroup}\n")
        (folder / "mountinfo").write_text(
            f"20 1 0:1 / / rw - ext4 /dev/x rw\n30 20 0:2 {root} {place} ro shared:1 - {mount}\n"
        )
        return folder

    return make


@pytest.mark.parametrize(
    ("cgroup", "root", "mount", "files", "expected"),
    [
        ("0::/", "/", V2, {"cpu.max": "200000 100000\n"}, 2),
        ("0::/", "/", V2, {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/", "/", V2, {"cpu.max": "max 100000\n"}, 16),
        ("0::/", "/", V2, {"cpu.max": "6400000 100000\n"}, 16),
        ("0::/", "/", V2, {}, 16),
        ("0::/a/b", "/", V2, {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
        ("0::/a/b", "/a", V2, {"b/cpu.max": "300000 100000\n", "cpu.max": "max 100000\n"}, 3),
        ("0::/../other", "/", V2, {"cpu.max": "200000 100000\n", "../cpu.max": "100000 100000\n"}, 2),
        ("3:cpu,cpuacct:/", "/", V1, {"cpu.cfs_quota_us": "200000\n", "cpu.cfs_period_us": "100000\n"}, 2),
        ("3:cpu,cpuacct:/docker/1", "/docker/1", V1, {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}, 0.5),
        ("3:cpu,cpuacct:/docker/1", "/", V1, {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}, 0.5),
        ("3:cpu,cpuacct:/", "/", V1, {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, 16),
    ],
)
def test_a_quota_counts_as_fewer_cores(process, cgroup, root, mount, files, expected):
    assert cores(process(cgroup, root, mount, files)) == expected


def test_without_control_groups_the_affinity_counts(tmp_path):
    assert cores(tmp_path) == len(os.sched_getaffinity(0))


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Return what a machine says of its GPUs, given the rows of nvidia-smi and the variables of CUDA."""

    def ask(rows, **variables):
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(f"CUDA_{name}", value)
        made = machine()
        return made["gpus"], made["driver"]

    return ask


MIXED = ("0, GPU-aa11, 570.1, NVIDIA H200", "1, GPU-bb22, 570.1, NVIDIA A, B")
ALIKE = ("0, GPU-aa11, 570.1, NVIDIA H200", "1, GPU-bb22, 570.1, NVIDIA H200")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["NVIDIA H200", "NVIDIA A, B"]),
        ("1", ["NVIDIA A, B"]),
        ("GPU-aa", ["NVIDIA H200"]),
        ("1,0", ["NVIDIA A, B", "NVIDIA H200"]),
        ("", []),
        ("7", None),
        ("MIG-cc", None),
    ],
)
def test_the_gpus_are_those_that_are_visible(gpus, visible, expected):
    chosen = {} if visible is None else {"VISIBLE_DEVICES": visible}
    found, driver = gpus(MIXED, DEVICE_ORDER="PCI_BUS_ID", **chosen)
    assert found == expected
    assert driver == "570.1" if expected is not None else driver.startswith("unknown: ")


@pytest.mark.parametrize("order", [{}, {"DEVICE_ORDER": "FASTEST_FIRST"}])
def test_a_number_in_cudas_own_order_names_no_gpu_where_they_differ(gpus, order):
    found, driver = gpus(MIXED, VISIBLE_DEVICES="0", **order)
    assert found is None
    with pytest.raises(EvidenceError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        device_class({"gpus": found, "driver": driver}, "cuda")
    assert gpus(MIXED, VISIBLE_DEVICES="GPU-bb", **order) == (["NVIDIA A, B"], "570.1")
    assert gpus(ALIKE, VISIBLE_DEVICES="1", **order) == (["NVIDIA H200"], "570.1")


@pytest.mark.parametrize("script", [None, "exit 9", "echo 'No devices were found'", "true"])
def test_a_machine_that_does_not_tell_its_gpus_says_so(tmp_path, monkeypatch, script):
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    made = machine()
    assert made["gpus"] is None
    assert made["driver"].startswith("unknown: ")
