"""A stand-in for an engine server, for tests of process handling only: `fake_server.py PORT MODE...`."""

import ctypes
import http.server
import json
import mmap
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

SLEEPER = "import time; time.sleep(600)"


def say(text):
    print(text, flush=True)


def note_pid(name, pid):
    folder = pathlib.Path(os.environ["FAKE_NOTES"])
    temporary = folder / f".{name}"
    temporary.write_text(str(pid))
    temporary.rename(folder / name)


class Handler(http.server.BaseHTTPRequestHandler):
    generates = True
    stuck = threading.Event()

    def do_GET(self):
        if self.path == "/block":
            self.stuck.wait(600)
        if self.path == "/die":
            os._exit(7)
        body = json.dumps({"drafts": 5 if self.generates else None}).encode()
        self.send_response(200 if self.path == "/generate" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def escape(clean):
    """Leave a grandchild in a session of its own, orphaned; `clean` also without any of our environment."""
    if (child := os.fork()) == 0:
        os.setsid()
        env = {"PATH": os.environ["PATH"]} if clean else None
        grandchild = subprocess.Popen([sys.executable, "-c", SLEEPER], env=env, start_new_session=True)
        note_pid("escaped-clean" if clean else "escaped", grandchild.pid)
        os._exit(0)
    os.waitpid(child, 0)


def hang_here():
    while True:
        time.sleep(600)


def main():
    port, modes = int(sys.argv[1]), sys.argv[2:]
    say("phase: loading weights")
    for mode in modes:
        match mode:
            case "die":
                say("ModuleNotFoundError: No module named 'flux'")
                sys.exit(3)
            case "die-by-kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "die-with-a-child":
                say("Traceback (most recent call last):\nAssertionError: loaded_weight.shape is 33\n")
                say("Received sigquit from a child process. It usually means the child failed.")
                os.kill(os.getpid(), signal.SIGKILL)
            case "slow":
                # Until a file says go on, so that no test depends on a duration.
                while not pathlib.Path(os.environ["FAKE_NOTES"], "go").exists():
                    time.sleep(0.02)
            case "hang":
                say("\u2026 about to hang")
                hang_here()
            case "spin":
                while True:
                    pass
            case "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case "escape":
                escape(clean=False)
                escape(clean=True)
            case "child":
                note_pid("child", subprocess.Popen([sys.executable, "-c", SLEEPER]).pid)
            case "retitle":
                # What setproctitle does: the environment's memory is overwritten.
                ctypes.CDLL(None)
                stat = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
                begin, end = int(stat[47]), int(stat[48])
                ctypes.memset(begin, 0, end - begin)
            case "shm":
                for held in ("open", "mapped"):
                    path = pathlib.Path(os.environ["FAKE_SHM"] + held)
                    path.write_bytes(b"x" * 4096)
                    file = path.open("r+b")
                    globals()[held] = file if held == "open" else mmap.mmap(file.fileno(), 4096)
                    if held == "mapped":
                        file.close()
            case "tmp":
                pathlib.Path(os.environ["TMPDIR"], "left-behind").write_text("x")
            case "silent":
                Handler.generates = False
            case "hostile":
                sys.stdout.buffer.write(
                    b"\xff\xfe\x00 not text \x1b[31mred\x1b[2J\x07\nphase: \xe2\x28\xa1 odd\rprogress 1\rprogress 2\n"
                )
                sys.stdout.buffer.flush()
            case "no-reuse":
                http.server.ThreadingHTTPServer.allow_reuse_address = False
            case "normal":
                pass
            case _:
                raise SystemExit(f"unknown mode {mode}")
    say("phase: binding")
    http.server.ThreadingHTTPServer.daemon_threads = True
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    say("phase: serving")
    server.serve_forever()


if __name__ == "__main__":
    main()
