"""`python -m draftgate_contract REQUEST RESULT`: run every trial of a request and write what each one showed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def main(request_file: str, result_file: str) -> None:
    """Run a request. The result file is written in any case, and says how far it came."""
    request: dict[str, Any] = json.loads(Path(request_file).read_text(encoding="utf-8"))
    result: dict[str, Any] = {"refused": "", "trials": {}, "aux": {}, "seconds": {}}
    started = time.monotonic()
    try:
        _run(request, result, started)
    except BaseException as error:  # noqa: BLE001 -- the result file is how the outcome is told, whatever it is
        result["refused"] = f"{type(error).__name__}: {' '.join(str(error).split())[:2000]}"
        result["traceback"] = traceback.format_exc()[-4000:]
    result["seconds"]["all"] = round(time.monotonic() - started, 1)
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")
    # Engines leave threads and process groups behind that keep an interpreter from ending.
    sys.stdout.flush()
    os._exit(0)


def _run(request: dict[str, Any], result: dict[str, Any], started: float) -> None:
    # The base environment's packages come after everything that belongs to the release.
    if request["engine"] == "sglang":
        from .engine_sglang import SGLang as Engine  # noqa: PLC0415 -- one of the two is there

        engine: Any = Engine(pretend_gpu=request["pretend_gpu"])
    else:
        from .engine_vllm import VLLM  # noqa: PLC0415 -- as above

        engine = VLLM()
    from . import trial  # noqa: PLC0415 -- imports torch, after the engine has been prepared

    result["version"] = engine.version
    result["architectures"] = engine.architectures()
    result["files"] = engine.files()
    result["made_with"] = {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
    }
    result["seconds"]["import"] = round(time.monotonic() - started, 1)
    scratch = Path(request["scratch"])
    for row in request["trials"]:
        try:
            seen = trial.run(engine, Path(row["folder"]), Path(row["target"]), scratch)
        except trial.Refused as refused:
            raise trial.Refused(f"trial {row['name']}: {refused}") from refused
        result["trials"][row["name"]] = seen
    for name, ids in request["aux"].items():
        result["aux"][f"captures {name}"] = engine.capture(request["target"], ids)
    for name, folder in request["ids"].items():
        for runner, ids in engine.configured(folder, request["target"]).items():
            result["aux"][" ".join(filter(None, ("reads", name, runner)))] = ids


if __name__ == "__main__":
    main(*sys.argv[1:])
