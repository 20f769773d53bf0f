"""Sandboxes that are containers of a docker daemon on this machine."""
