"""What names, causes and logs may hold that wants to be more than text."""

MARK = "EVIL"

PAYLOADS = {
    "script": "<script>EVIL()</script>",
    "attribute": '"\' onmouseover=EVIL() x="',
    "tag end": "--></title></style></svg><img src=//example.org/EVIL.png onerror=EVIL()>",
    "template": "{{ 7 * 7 }}{% raw %}EVIL{% endraw %}",
    "css": "</style><style>@import url(https://example.org/EVIL.css)",
    "markdown": "| EVIL | [link](https://example.org/EVIL) ![image](//example.org/EVIL.png) `code` **b** <b>x",
    "mention": "@EVIL #123 GH-7 www.example.org https://example.org/EVIL $x$ ~~y~~ owner/repo#5",
    "ansi": "\x1b[31mEVIL\x1b[0m\x1b]8;;https://example.org\x07here\x1b]8;;\x07",
    "workflow": "EVIL, file=x: y\n::set-output name=x::y\r\n::error::z%0A\n##[command]rm",
    "controls": "EVIL\x00\x07\x08\x7f\x85\u2028",
    "direction": "EVIL\u202egnp.exe\u2066\u200b\ufeff",
    "surrogate": "EVIL\ud800",
    "long word": "EVIL" + "W" * 5_000,
    "lines": "EVIL\n\n# heading\n\n- item\n\n    code\n\n---\n",
}


KEPT = ("verdict", "role", "kind", "suite", "started", "finished")
NAMES = (
    "servers", "packages", "env", "unused_keys", "tensors_not_filled", "not_asked", "oracle", "machine", "asked",
    "never_judged", "not_selected",
)  # fmt: skip
"""Keys whose value is a table by names from outside."""


def poisoned(value, suffix, key=""):
    """Return a record in which every text from outside, names of servers and packages included, ends in `suffix`."""
    if isinstance(value, dict):
        return {(name + suffix if key in NAMES else name): poisoned(each, suffix, name) for name, each in value.items()}
    if isinstance(value, list):
        return [poisoned(each, suffix, key) for each in value]
    if isinstance(value, str) and value and key not in KEPT:
        return value + suffix
    return value
