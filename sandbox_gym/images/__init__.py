"""Images: root file systems out of archives, folders and a docker daemon, unpacked once into a store of this user's.

`image` is what users see. `archives` reads what docker and others write, `tar` and `layers` unpack it, `store` keeps it.
Knows nothing of sandboxes: any backend may use it.
"""
