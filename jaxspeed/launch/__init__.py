"""Many processes: started on this host, over ssh or by a scheduler, and found by each of them.

The launcher imports neither JAX nor the config: it starts at once and needs little memory.
`environment.py` runs in the processes.
"""
