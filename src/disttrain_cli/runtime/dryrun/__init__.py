"""Steps on fake CUDA devices: what every stage of a plan would do and hold on a GPU, seen on a
machine without one."""
