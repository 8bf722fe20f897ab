"""One model, one context, no policy.

`context/` keeps the rules (ledger, atomic decodes, live views) once, for every engine;
an engine supplies a `Core` (see `core.py`) that only moves tokens and bytes.
"""
