"""Sandboxes from Linux namespaces alone: no daemon, no image.

One supervisor process per client makes them (`supervisor`, started by `client` through `launch`); each kernel concern
has its file: `disk`, `rootfs`, `overlay`, `cgroups`, `seccomp`, `spawn`, `planner`.
"""
