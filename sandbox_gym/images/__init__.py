"""Images: root file systems out of archives, folders and a docker daemon, unpacked once into a store of this user's.

`image` is what users see. `archives` and `files` read what docker and others write, `tar`, `layers` and `trees` unpack
it, `store` keeps it. Knows nothing of sandboxes: any backend may use it.
"""
