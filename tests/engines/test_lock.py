"""Reading locks, and saying what uv and pip mean when they fail."""

from __future__ import annotations

import pytest

from harness.engines.complaints import explain
from harness.engines.lock import read
from harness.errors import UsageError

LOCK = """\
# a lock
Toy_Engine==1.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via something
torch==2.13.0+cpu --hash=sha256:cc
vllm @ git+file:///repository@0123 # built here
helper @ https://index.example/helper-1-py3-none-any.whl#sha256=dd \\
    --hash=sha256:dd
"""


def test_reads_every_entry_with_its_hashes() -> None:
    locked = read(LOCK, "lock.txt")
    assert {name: each.version or each.url for name, each in locked.items()} == {
        "toy-engine": "1.0",
        "torch": "2.13.0+cpu",
        "vllm": "git+file:///repository@0123",
        "helper": "https://index.example/helper-1-py3-none-any.whl#sha256=dd",
    }
    assert locked["toy-engine"].text == "Toy_Engine==1.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb"
    assert locked["torch"].text == "torch==2.13.0+cpu --hash=sha256:cc"


@pytest.mark.parametrize(
    "line",
    [
        "helper",
        "helper>=1",
        "helper==1.*",
        "helper===1",
        "helper==1,<2",
        "-r other.txt",
        "--index-url https://x",
        "-e .",
        "a b",
    ],
)
def test_refuses_what_is_not_one_version_and_names_the_line(line: str) -> None:
    with pytest.raises(UsageError, match=r"lock\.txt, line 2: "):
        read(f"toy-engine==1.0\n{line}\n", "lock.txt")


def test_refuses_two_versions_of_one_distribution() -> None:
    with pytest.raises(UsageError, match="line 3: a second entry of toy-engine"):
        read("toy-engine==1.0\nhelper==1\nToy.Engine==1.1\n", "lock.txt")


@pytest.mark.parametrize(
    ("output", "meaning"),
    [
        (
            (
                "error: No solution found when resolving dependencies\n  cause: Because nothere was not found in the "
                "package registry and all versions of lacks depend on nothere>=2, we can conclude that"
            ),
            "nothere: the package index does not have it, and lacks needs nothere>=2",
        ),
        (
            "No solution found: Because there is no version of helper==9 and you require helper==9, we can conclude",
            "helper==9: there is no such version to take",
        ),
        (
            (
                "ERROR: Could not find a version that satisfies the requirement torch==9 (from versions: 2.13.0)\n"
                "ERROR: No matching distribution found for torch==9"
            ),
            "torch==9: the package index does not have it",
        ),
        (
            (
                "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError': /simple/torch/\n"
                "ERROR: No matching distribution found for torch==9"
            ),
            "torch: the package index is unreachable",
        ),
        (
            "error: Failed to fetch: `https://index.example/simple/helper/`\n  Caused by: operation timed out",
            "helper: the package index is unreachable",
        ),
        (
            (
                "error: Failed to fetch: `https://index.example/simple/helper/`\n"
                "  Caused by: HTTP status client error (403 Forbidden) for url (https://index.example/simple/helper/)"
            ),
            "helper: the package index answers 403 Forbidden",
        ),
        (
            (
                "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n"
                "    torch==2.13.0+cpu from file:///x.whl (from -r torch.txt (line 1)):\n        Expected sha256 00"
            ),
            "torch==2.13.0+cpu: its content does not have the hash that the lock or the package index gives",
        ),
        ("  cause: failed to write to file: No space left on device (os error 28)", "the disk is full"),
        (
            (
                "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError': /simple/torch/\n"
                "  cause: Hash mismatch for `helper==3.1`"
            ),
            "helper==3.1: its content does not have the hash that the lock or the package index gives",
        ),
        (
            (
                "  cause: failed to fetch branch or tag `main`\n  cause: process didn't exit successfully\n"
                "         fatal: unable to access 'https://git.example/x/': Could not resolve host: git.example"
            ),
            (
                "revision main: git cannot fetch it: unable to access 'https://git.example/x/': "
                "Could not resolve host: git.example"
            ),
        ),
        ("something new", ""),
    ],
)
def test_says_what_an_installer_means(output: str, meaning: str) -> None:
    assert explain(output) == meaning
