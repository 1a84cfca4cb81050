"""Coverage-guided fuzzing of the readers with Atheris, which is installed for this alone.

    python -m tests.fuzz.fuzz header -max_total_time=600 -max_len=1024

`header`, `text` or `index`; the rest goes to libFuzzer. Inputs that reach something new go to a temporary folder, which
is printed; they are small, and are kept by copying them into the corpus.
"""

import struct
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["harness.checkpoint"]):
    from tests.fuzz import oracle

_HERE = Path(__file__).parent


def _mutate_header(data, max_size, seed):
    """Mutate the header and, seven times of eight, put its length right: few mutations hit on it."""
    if seed % 8 == 0 or len(data) < 8:
        return atheris.Mutate(data, len(data))
    length = min(int.from_bytes(data[:8], "little"), len(data) - 8)
    raw = atheris.Mutate(data[8 : 8 + length], max(max_size - 8, 1))
    rest = data[8 + length :]
    return (struct.pack("<Q", len(raw)) + raw + (atheris.Mutate(rest, len(rest) + 1) if seed % 8 == 1 else rest))[
        :max_size
    ]


def main():
    """Fuzz one reader until told to stop."""
    target, *options = sys.argv[1:]
    places = [option for option in options if not option.startswith("-")]
    if not places:
        places = [tempfile.mkdtemp(prefix=f"fuzz-{target}-"), str(_HERE / "corpus" / target)]
    options = [option for option in options if option.startswith("-")]
    extra = {"custom_mutator": _mutate_header} if target == "header" else {}
    atheris.Setup([sys.argv[0], f"-dict={_HERE / 'words.dict'}", *options, *places], getattr(oracle, target), **extra)
    print(f"new inputs go to {places[0]}", flush=True)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
