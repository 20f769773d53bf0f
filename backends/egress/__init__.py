"""What a sandbox may reach of the network, for any backend whose sandboxes have a network namespace of the kernel's.

`network` makes listening sockets in that namespace; one process outside, the `proxy`, serves them by the rules, and
`gateway` is a supervisor's hold on it.
"""
