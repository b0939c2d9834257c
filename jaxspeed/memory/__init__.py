"""What is kept, what is made again and what waits in host memory.

`recompute` turns what the config says into what each unit of a program keeps.
"""
