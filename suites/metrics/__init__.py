"""One promise each; see docs/suites.md."""
