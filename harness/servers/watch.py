"""When is a server hung, and where: the stall rule, the stacks, and the kernel's word on memory."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

from harness.servers.tree import Member

__all__ = ["Stall", "oom_kills", "stacks"]

# Less CPU than this since the last progress is none: a blocked engine's threads still wake to look at their clocks.
_IDLE_SHARE = 0.01
_IDLE_S = 0.05
_DUMP_S = 20.0


@dataclasses.dataclass
class Stall:
    """Whether log and CPU have stood still for `limit_s`. Feed it from `now`, a monotonic clock in seconds."""

    limit_s: float
    since: float
    log_size: int = 0
    cpu_s: float = 0.0

    @property
    def interval_s(self) -> float:
        """How often to observe: often enough to be within a tenth of the limit, seldom enough to cost nothing."""
        return min(5.0, max(0.1, self.limit_s / 10))

    def observe(self, now: float, log_size: int, cpu_s: float) -> bool:
        """Return whether the limit has passed without progress; progress starts it anew."""
        if log_size != self.log_size or cpu_s - self.cpu_s > _IDLE_S + _IDLE_SHARE * (now - self.since):
            self.since, self.log_size, self.cpu_s = now, log_size, cpu_s
        return now - self.since >= self.limit_s


def stacks(members: list[Member]) -> str:
    """Return py-spy's stacks of the Python processes among `members`, or why there are none."""
    beside = Path(sys.executable).with_name("py-spy")
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    if tool is None:
        return "  no stacks: py-spy is not installed (pip install py-spy)"
    blocks = [_dump(tool, member) for member in members if _is_python(member.pid)]
    return "\n".join(blocks) if blocks else "  no stacks: none of the server's processes is a Python"


def oom_kills() -> int | None:
    """Return how many processes the OOM killer has ended since boot (/proc/vmstat), None if that does not say."""
    try:
        rows = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(row.split()[1]) for row in rows if row.startswith("oom_kill ")), None)


def _is_python(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("python")
    except OSError:  # it has ended
        return False


def _dump(tool: str, member: Member) -> str:
    try:
        done = subprocess.run(
            [tool, "dump", "--pid", str(member.pid)],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_DUMP_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"  no stack of {member}: py-spy took more than {_DUMP_S:.0f} s"
    if done.returncode == 0:
        text = done.stdout.decode(errors="backslashreplace")
        return "\n".join(f"  {line}" for line in text.rstrip().splitlines())
    why = " ".join(done.stderr.decode(errors="backslashreplace").split())
    if "ermission" in why:
        why += " (py-spy needs to be root or to have CAP_SYS_PTRACE, or kernel.yama.ptrace_scope 0)"
    return f"  no stack of {member}: {why}"
