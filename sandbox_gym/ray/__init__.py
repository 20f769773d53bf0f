"""sandbox_gym over a cluster, by Ray: jobs, a policy's scores, searches."""
