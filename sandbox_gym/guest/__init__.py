"""What runs inside a sandbox: standard library only (`hosted` and `spaces` add numpy and Gymnasium).

The folder is copied into each root file system as the package `sandbox_gym_guest`, so modules here import
each other relatively and nothing else of sandbox_gym. The host reads `wire` and `syscalls` from here too.
"""
