"""`RepoRepair-v0`: real packages with one bug put in, and their own tests as hidden graders; and what makes them."""
