"""Sandboxes with a kernel of their own, gVisor's: `runsc` runs, checkpoints and restores them. For hostile code."""
