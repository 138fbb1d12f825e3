"""What kernels compiled for NVIDIA GPUs share; the kernels themselves are in `quack_kernels.kernels`.

A row is cut among the threads of one group, and for long rows among the CTAs of one cluster:

    row        [ CTA 0 of the cluster            | CTA 1            | ... ]
    CTA part   [ vectors 0 .. T-1 | T .. 2T-1 | ... ]     thread t takes vectors t, T + t, 2T + t, ...
    vector     16 bytes of the row's dtype

config.py decides the numbers, rows.py moves rows between memory and registers, reduction.py combines what threads
found, exponential.py is exp where the hardware's is not good enough.
"""
