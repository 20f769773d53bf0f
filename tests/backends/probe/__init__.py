"""Attempts to escape from a sandbox and to snoop, made inside it: `python3 -m probe '{"secrets": ...}'`.

Each prints a line of JSON: what was tried, a verdict, and the evidence. "refused": an error. "contained": it was done
to what is the sandbox's own. "possible": it was done to what is shared, or something of others was found. Nothing here
does harm where it works: settings are written as they are, calls have arguments that no kernel takes.
"""
